//! The gate's network traffic: every connection of a sandbox goes through this crate.
//!
//! [`listeners`] accepts connections, [`connection`] detects their protocol, and every request goes
//! through [`pipeline`]. [`dialer`] opens all upstream connections, and [`dns`] answers DNS
//! queries. [`services`] holds what all connections share, [`sandbox_state`] the state of one
//! sandbox.
//!
//! **Never here:** traffic that bypasses the listeners, a credential on a request that was not
//! allowed, SQL, or the sandboxes themselves.

pub mod added_rules;
pub mod admission;
pub mod alarm;
pub mod authority;
pub mod body;
pub mod body_stream;
pub mod branches;
pub mod caller;
mod chunked_reader;
pub mod client_connection;
pub mod clock;
pub mod closed_ports;
pub mod connection;
pub mod credential_stage;
pub mod datagram;
pub mod dialer;
pub mod dns;
pub mod forward;
pub mod framing;
pub mod git;
pub mod git_protocol;
pub mod headers;
pub mod hello;
pub mod ids;
pub mod in_flight;
pub mod internal;
pub mod leaf;
pub mod limit_metrics;
pub mod listener_checks;
pub mod listeners;
pub mod message;
pub mod metrics;
pub mod mirror;
pub mod mirror_server;
pub mod outgoing;
pub mod own_request;
pub mod passthrough;
pub mod pipeline;
pub mod publish;
pub mod rate_limits;
pub mod redacted_body;
pub mod refusal;
pub mod request;
pub mod request_cx;
pub mod request_log;
pub mod resolvers;
pub mod response_filters;
pub mod sandbox_state;
pub mod services;
pub mod source;
pub mod splice;
pub mod spool;
pub mod stage;
pub mod trial;
pub mod unread_body;
pub mod websocket;
