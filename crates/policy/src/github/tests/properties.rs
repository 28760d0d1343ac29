//! Properties that hold for every spelling of a request.

use proptest::prelude::*;
use serde_json::json;

use super::*;

/// Requests that the default rules refuse.
const REFUSED_REQUESTS: &[(&str, &str)] = &[
    ("GET", "/repos/acme/widget/hooks"),
    ("GET", "/repos/acme/widget/keys/1"),
    ("GET", "/repos/acme/widget/actions/secrets"),
    ("GET", "/repos/acme/widget/environments/prod/secrets"),
    ("GET", "/repos/acme/other/contents/a"),
    ("GET", "/repositories/1"),
    ("GET", "/user/repos"),
    ("PUT", "/repos/acme/widget/pulls/1/merge"),
    ("POST", "/repos/acme/widget/merges"),
    ("POST", "/repos/acme/widget/releases"),
    ("PATCH", "/repos/acme/widget"),
    ("DELETE", "/repos/acme/widget"),
    ("PUT", "/repos/acme/widget/contents/a"),
    ("DELETE", "/repos/acme/widget/git/refs/heads/main"),
    ("POST", "/repos/acme/other/issues/1/comments"),
    ("POST", "/repos/acme/widget/actions/workflows/1/dispatches"),
];

/// One of the spellings of a byte of a path, or the byte with something inserted.
fn spell(byte: u8, how: u8) -> String {
    let c = char::from(byte);
    match how % 12 {
        0 => format!("%{byte:02X}"),
        1 => format!("%{byte:02x}"),
        2 => c.to_ascii_uppercase().to_string(),
        3 => c.to_ascii_lowercase().to_string(),
        4 if byte == b'/' => "//".to_owned(),
        5 if byte == b'/' => "/./".to_owned(),
        6 if byte == b'/' => "/x/../".to_owned(),
        7 if byte == b'/' => ";p/".to_owned(),
        8 if byte == b'/' => "%2F".to_owned(),
        9 => format!("{c};x=1"),
        _ => c.to_string(),
    }
}

/// Fields that lead to other repositories or contain secrets. No scope lists them.
const UNLISTED_FIELDS: &[&str] = &[
    "repositories",
    "forks",
    "enterprise",
    "organizations",
    "tempCloneToken",
    "search",
    "gists",
    "closingIssuesReferences",
    "timelineItems",
    "deployKeys",
    "starredRepositories",
    "vulnerabilityAlerts",
    "projectsV2",
];

/// Wraps a selection in another one that is allowed, or looks allowed.
fn wrap(inner: &str, how: u8, index: usize) -> String {
    match how % 8 {
        0 => format!("owner {{ {inner} }}"),
        1 => format!("a{index}: issue(number: 1) {{ {inner} }}"),
        2 => format!("... on Repository {{ {inner} }}"),
        3 => format!("... @include(if: true) {{ {inner} }}"),
        4 => format!("id {inner} name"),
        5 => format!("pullRequest(number: 1) {{ author {{ ... on User {{ {inner} }} }} }}"),
        6 => format!("nodes {{ {inner} }}"),
        _ => format!("# viewer\n{inner}"),
    }
}

proptest! {
    #[test]
    fn refused_path_is_refused_in_every_spelling(
        row in 0..REFUSED_REQUESTS.len(),
        places in prop::collection::vec((0_usize..60, any::<u8>()), 0..6),
        tail in prop::sample::select(vec!["", "/", ".", ";x", "%20", "?x=1", "%2F", ".json", "%00"]),
    ) {
        let (method, target) = REFUSED_REQUESTS[row];
        let mut spelt = String::new();
        for (index, byte) in target.bytes().enumerate() {
            match places.iter().find(|(place, _)| *place == index && index > 0) {
                Some((_, how)) => spelt += &spell(byte, *how),
                None => spelt.push(char::from(byte)),
            }
        }
        spelt += tail;
        if let Ok(path) = CleanPath::parse(&spelt) {
            let verdict = call(method, &spelt, "{}").judge(&rules(&[]));
            // The changed path may be another, allowed resource; it must not be the refused one in
            // any reading.
            if let Ok(rule) = verdict {
                let closed = crate::endpoint::PathPattern::parse(target).unwrap();
                let lower = CleanPath::parse(&path.target().to_ascii_lowercase()).unwrap();
                prop_assert!(!closed.touches(&lower), "{method} {spelt} by {rule}");
            }
        }
    }

    #[test]
    fn case_of_owner_and_name_does_not_change_verdict(
        upper in prop::collection::vec(any::<bool>(), 11),
    ) {
        let name: String = "acme/widget"
            .chars()
            .zip(&upper)
            .map(|(c, up)| if *up { c.to_ascii_uppercase() } else { c })
            .collect();
        let read = format!("/repos/{name}/pulls");
        prop_assert_eq!(call("GET", &read, "").verdict(&rules(&[])), "+read");
        let merge = format!("/repos/{name}/pulls/1/merge");
        prop_assert_eq!(call("PUT", &merge, "{}").verdict(&rules(&[])), "-merge");
    }

    #[test]
    fn document_with_denied_field_is_refused_however_wrapped(
        field in prop::sample::select(UNLISTED_FIELDS),
        alias in any::<bool>(),
        hows in prop::collection::vec(any::<u8>(), 0..6),
        fragment_at in 0_usize..6,
    ) {
        let alias = if alias { "id: " } else { "" };
        let mut inner = format!("{alias}{field}(first: 1) {{ totalCount }}");
        let mut fragments = String::new();
        for (index, how) in hows.iter().enumerate() {
            inner = wrap(&inner, *how, index);
            if index == fragment_at {
                fragments = format!("\nfragment F on Repository {{ {inner} }}");
                inner = "...F".to_owned();
            }
        }
        let query = format!(
            "query {{ repository(owner: \"acme\", name: \"widget\") {{ {inner} }} }}{fragments}"
        );
        let body = json!({ "query": query }).to_string();
        let verdict = call("POST", "/graphql", &body).verdict(&rules(&[]));
        prop_assert_eq!(verdict, "-graphql-read", "{}", query);
    }

    #[test]
    fn arbitrary_body_never_panics(
        bytes in prop::collection::vec(any::<u8>(), 0..400),
        graphql in any::<bool>(),
    ) {
        let target = if graphql { "/graphql" } else { "/repos/acme/widget/pulls/1" };
        let method = Method::parse(if graphql { "POST" } else { "PATCH" }).unwrap();
        let verdict = rules(&[]).judge(&GithubRequest {
            method: &method,
            host: &Host::parse("api.github.com").unwrap(),
            path: &CleanPath::parse(target).unwrap(),
            has_method_override: false,
            content_type: Some(JSON),
            body: Some(&bytes),
            repos: &repos(),
        });
        let is_object = serde_json::from_slice::<serde_json::Map<_, _>>(&bytes).is_ok();
        prop_assert!(verdict.is_err() || is_object);
    }

    #[test]
    fn arbitrary_document_never_panics(
        query in prop_oneof![
            any::<String>(),
            "[{}()\\[\\]:.@$!\"#,a-c \\n=|&]{0,80}",
            "(query|mutation|fragment|on|repository|\\{|\\}|\\(|\\)|\\[|\\]|:|\\.\\.\\.|@|\\$|\"|!|=| |id|a|1|-){0,60}",
        ],
    ) {
        let body = json!({ "query": query }).to_string();
        let verdict = call("POST", "/graphql", &body).judge(&rules(&[]));
        // A valid query such as `{ __typename }` is not generated by chance.
        prop_assert!(verdict.is_err(), "{query}");
    }
}
