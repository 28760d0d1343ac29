//! `server`: addresses of the interceptor API and the MCP server.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::leaf::{self, Text};
use crate::secret::Secret;

/// The interceptor API and the MCP server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ServerSection {
    /// Listen address of the interceptor hooks. `:8090` means every address.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<SocketAddr>")]
    pub interceptor_addr: SocketAddr,
    /// Listen address for MCP clients; may be the same as `interceptor_addr`.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<SocketAddr>")]
    pub mcp_server_addr: SocketAddr,
    /// One listen address for both, instead of `interceptor_addr` and `mcp_server_addr`.
    #[serde(with = "leaf::optional")]
    #[schemars(with = "Option<Text<SocketAddr>>")]
    pub single_port: Option<SocketAddr>,
    /// How long the gate may take to stop. Requests in flight and tools get four fifths of this
    /// time to end; the rest is for the audit log.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<Duration>")]
    pub shutdown_timeout: Duration,
    /// Token that clients must present, as a Bearer token or as the password of Basic
    /// authentication. Required if an address is not a loopback address.
    pub auth_token: Option<Secret>,
    /// How long an MCP session may have no connection before its server process is stopped.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<Duration>")]
    pub session_idle: Duration,
    /// Refuse clients that do not send an agent ID.
    pub enforce_agent_id: bool,
}

impl Default for ServerSection {
    fn default() -> Self {
        let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 8090);
        Self {
            interceptor_addr: address,
            mcp_server_addr: address,
            single_port: None,
            shutdown_timeout: Duration::from_secs(10),
            auth_token: None,
            session_idle: Duration::from_secs(5 * 60),
            enforce_agent_id: false,
        }
    }
}

impl ServerSection {
    /// Listen address of the interceptor, with `single_port` taken into account.
    pub fn interceptor(&self) -> SocketAddr {
        self.single_port.unwrap_or(self.interceptor_addr)
    }

    /// Listen address of the MCP server, with `single_port` taken into account.
    pub fn mcp(&self) -> SocketAddr {
        self.single_port.unwrap_or(self.mcp_server_addr)
    }
}
