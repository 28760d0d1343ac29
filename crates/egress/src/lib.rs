//! The gate's traffic: what a sandbox says to the world passes here and nowhere else.
//!
//! [`doors`] accepts, [`connection`] finds out what is spoken, and every request, however
//! it came, goes through [`pipeline`]; [`dialer`] is the one way out and [`dns`] answers for
//! names. [`traffic`] holds what they share, [`guest`] what is kept for one sandbox.
//!
//! **Never here:** a way round the listeners, a credential on a request that nobody
//! cleared, SQL, or the sandboxes themselves.

pub mod added_rules;
pub mod alarm;
pub mod authority;
pub mod body;
pub mod caller;
pub mod clock;
pub mod closed_ports;
pub mod connection;
pub mod datagram;
pub mod dialer;
pub mod dns;
pub mod doors;
pub mod flow;
pub mod forward;
pub mod framing;
pub mod git;
pub mod github;
pub mod guest;
pub mod headers;
pub mod hello;
pub mod ids;
pub mod internal;
pub mod leaf;
pub mod leftover;
pub mod listener_checks;
pub mod live;
pub mod mirror;
pub mod numbers;
pub mod passthrough;
mod pieces;
pub mod pipeline;
pub mod ports;
pub mod publish;
pub mod question;
pub mod refusal;
pub mod rego;
pub mod request;
pub mod resolvers;
pub mod splice;
pub mod traffic;
pub mod trail;
pub mod trial;
pub mod upstream;
pub mod websocket;
