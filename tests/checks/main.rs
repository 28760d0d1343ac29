//! Tests of every required cell of the table in `decide::checks`, through the real entry point. The
//! driver of a cell first sends a subject that must be allowed, and then a subject that exactly
//! this check must deny.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed expectation fails the test"
)]

mod audit;
#[path = "../mcp/bridge.rs"]
#[expect(dead_code, reason = "a fixture of other tests, which use more of it")]
mod bridge;
mod client;
mod connect;
#[path = "../git/git_fixture.rs"]
#[expect(dead_code, reason = "a fixture of other tests, which use more of it")]
mod git_fixture;
mod mirror;
mod name;
mod network;
mod own_request;
mod passthrough;
mod push;
mod repository;
mod request;
mod tool;
#[path = "../traffic/traffic_fixture.rs"]
#[expect(dead_code, reason = "a fixture of other tests, which use more of it")]
mod traffic_fixture;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use decide::checks::{Check, Requirement, SubjectKind, requirement};

use crate::network::{ClientKind, Network};
use crate::own_request::OwnRequests;
use crate::push::Pushes;
use crate::repository::{Entry, Repository};
use crate::tool::{Caller, Tools};

/// A cell of the table: a kind of subject and a check.
type Cell = (SubjectKind, Check);

/// Defines the tests. Each entry has names of tests with their fixtures, and the list of cells,
/// with drivers, that each of these tests drives. A fixture is `None` if this machine lacks a
/// requirement of the test; the reason has been printed then.
macro_rules! cells {
    ($($($test:ident: $fixture:expr),+ => $list:tt)*) => {
        /// Every cell that a test drives.
        const DRIVEN: &[&[Cell]] = &[$(cells_of!($list)),*];

        $($(#[test]
        fn $test() {
            if let Some(fixture) = $fixture {
                let failed: Vec<Cell> = drive_all!(fixture, $list).into_iter().flatten().collect();
                assert!(failed.is_empty(), "cells that failed: {failed:?}");
            }
        })+)*
    };
}

/// The cells of a list, without their drivers.
macro_rules! cells_of {
    ({$(($subject:ident, $check:ident): $driver:expr,)*}) => {
        &[$((SubjectKind::$subject, Check::$check),)*]
    };
}

/// Calls the drivers of a list one after the other. Returns the failed cells.
macro_rules! drive_all {
    ($fixture:ident, {$(($subject:ident, $check:ident): $driver:expr,)*}) => {
        [$(drive((SubjectKind::$subject, Check::$check), || $driver(&$fixture)),)*]
    };
}

/// Calls the driver of a cell. Returns the cell if the driver panics.
fn drive(cell: Cell, driver: impl FnOnce()) -> Option<Cell> {
    println!("{cell:?}");
    let outcome = catch_unwind(AssertUnwindSafe(driver));
    outcome.is_err().then_some(cell)
}

// A driver that ends the registration of the client must be the last of its list.
cells! {
    request_through_the_proxy_is_denied: Network::start(ClientKind::Proxy),
    request_in_a_tunnel_is_denied: Network::start(ClientKind::Tunnel),
    request_at_a_transparent_listener_is_denied: Network::start(ClientKind::Sandbox) => {
        (Request, Rate): request::rate,
        (Request, Breaker): request::breaker,
        (Request, Labels): request::labels,
        (Request, Allowlist): request::allowlist,
        (Request, Github): request::github,
        (Request, OverrideHeader): request::override_header,
        (Request, Bundles): request::bundles,
        (Request, Repository): request::repository,
        (Request, Address): request::address,
        (Request, Identity): request::identity,
    }
    own_request_for_a_push_is_denied: OwnRequests::start() => {
        (OwnRequest, Identity): own_request::identity,
        (OwnRequest, Rate): own_request::rate,
        (OwnRequest, Breaker): own_request::breaker,
        (OwnRequest, Labels): own_request::labels,
        (OwnRequest, Allowlist): own_request::allowlist,
        (OwnRequest, Bundles): own_request::bundles,
        (OwnRequest, Repository): own_request::repository,
        (OwnRequest, Address): own_request::address,
    }
    connect_is_denied: Network::start(ClientKind::Untrusting) => {
        (Connect, Allowlist): connect::allowlist,
        (Connect, Identity): connect::identity,
    }
    passthrough_in_a_tunnel_is_denied: Network::start(ClientKind::Tunnel),
    passthrough_at_a_transparent_listener_is_denied: Network::start(ClientKind::Sandbox) => {
        (Passthrough, Rate): passthrough::rate,
        (Passthrough, Breaker): passthrough::breaker,
        (Passthrough, Labels): passthrough::labels,
        (Passthrough, Allowlist): passthrough::allowlist,
        (Passthrough, Bundles): passthrough::bundles,
        (Passthrough, Address): passthrough::address,
        (Passthrough, Identity): passthrough::identity,
    }
    mirror_over_http_is_denied: Repository::start(Entry::Mirror, ""),
    mirror_over_the_git_protocol_is_denied: Repository::start(Entry::GitProtocol, "") => {
        (Mirror, Mirror): mirror::mirror,
        (Mirror, Address): mirror::address,
        (Mirror, Identity): mirror::identity,
    }
    mirror_over_http_beyond_the_rate_is_denied:
        Repository::start(Entry::Mirror, mirror::POLICY),
    mirror_over_the_git_protocol_beyond_the_rate_is_denied:
        Repository::start(Entry::GitProtocol, mirror::POLICY) => {
        (Mirror, Rate): mirror::rate,
    }
    push_to_a_host_is_denied: Pushes::start(Entry::Host),
    push_to_a_mirror_over_http_is_denied: Pushes::start(Entry::Mirror),
    push_to_a_mirror_over_the_git_protocol_is_denied: Pushes::start(Entry::GitProtocol) => {
        (Push, Refs): push::refs,
        (Push, PushSize): push::size,
        (Push, Objects): push::objects,
        (Push, Bundles): push::bundles,
        (Push, PushRate): push::rate,
    }
    name_on_a_shared_network_is_denied: Network::start(ClientKind::Proxy),
    name_in_a_sandbox_is_denied: Network::start(ClientKind::Sandbox) => {
        (Name, Labels): name::labels,
        (Name, Allowlist): name::allowlist,
        (Name, Address): name::address,
        (Name, Identity): name::identity,
    }
    name_beyond_the_rate_is_dropped: Network::with_dns_settings(ClientKind::Proxy, ", rate: 1, burst: 2") => {
        (Name, Rate): name::rate,
    }
    tool_in_a_session_is_denied: Tools::start(Caller::Session),
    tool_without_a_session_is_denied: Tools::start(Caller::Stateless) => {
        (McpCall, StoredDecision): tool::stored_decision,
        (McpCall, ToolList): tool::tool_list,
        (McpCall, Bundles): tool::bundles,
        (McpResult, Bundles): tool::result_bundles,
        (McpQuestion, Bundles): tool::question_bundles,
        (McpCall, ToolList): tool::fingerprint,
    }
    tool_of_a_container_is_denied: Tools::start(Caller::Container) => {
        (McpCall, ToolList): tool::tool_list,
        (McpCall, Bundles): tool::bundles,
        (McpResult, Bundles): tool::result_bundles,
        (McpQuestion, Bundles): tool::question_bundles,
        (McpCall, Identity): tool::identity,
    }
}

#[test]
fn every_required_cell_is_driven_and_no_other() {
    let cells = |subject| Check::ALL.map(|check| (subject, check));
    let cells = SubjectKind::ALL.into_iter().flat_map(cells);
    let required =
        cells.filter(|(subject, check)| requirement(*subject, *check) == Requirement::Required);
    let required: BTreeSet<Cell> = required.collect();
    let driven: BTreeSet<Cell> = DRIVEN.concat().into_iter().collect();
    let missing: Vec<_> = required.difference(&driven).collect();
    assert!(
        missing.is_empty(),
        "required cells without a test: {missing:?}"
    );
    let not_required: Vec<_> = driven.difference(&required).collect();
    assert!(
        not_required.is_empty(),
        "tested cells that are not required: {not_required:?}"
    );
}
