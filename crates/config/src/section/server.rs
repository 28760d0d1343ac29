//! `server`: the interceptor's and the MCP server's addresses.

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
    /// Where the before and after hooks listen. `:8090` means every address.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<SocketAddr>")]
    pub interceptor_addr: SocketAddr,
    /// Where MCP clients connect; may be the same address.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<SocketAddr>")]
    pub mcp_server_addr: SocketAddr,
    /// One address for both, instead of the two above.
    #[serde(with = "leaf::maybe")]
    #[schemars(with = "Option<Text<SocketAddr>>")]
    pub single_port: Option<SocketAddr>,
    /// How long the gate's stop may take. Requests in flight and tools have four fifths of it to
    /// end; the rest is for the audit log.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<Duration>")]
    pub shutdown_timeout: Duration,
    /// Token that clients must present, as Bearer or as the password of Basic. Required when an
    /// address is not loopback.
    pub auth_token: Option<Secret>,
    /// How long an MCP session may be without a connection before its server is ended.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<Duration>")]
    pub session_idle: Duration,
    /// Refuse clients that do not say which agent they are.
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
    /// Where the interceptor listens, with `single_port` taken into account.
    pub fn interceptor(&self) -> SocketAddr {
        self.single_port.unwrap_or(self.interceptor_addr)
    }

    /// Where the MCP server listens, with `single_port` taken into account.
    pub fn mcp(&self) -> SocketAddr {
        self.single_port.unwrap_or(self.mcp_server_addr)
    }
}
