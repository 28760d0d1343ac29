use proptest::prelude::*;

use super::*;

/// An event as a client parses it.
#[derive(Debug, Default, PartialEq, Eq)]
struct ParsedEvent {
    id: Option<String>,
    name: Option<String>,
    retry: Option<u32>,
    data: Option<String>,
}

/// Parses a stream as the standard requires of a client.
fn parse(stream: &str) -> Vec<ParsedEvent> {
    let mut events = Vec::new();
    let mut event = ParsedEvent::default();
    let stream = stream.replace("\r\n", "\n").replace('\r', "\n");
    for line in stream.lines() {
        if line.is_empty() {
            events.push(std::mem::take(&mut event));
            continue;
        }
        let (name, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match name {
            "id" => event.id = Some(value.to_owned()),
            "event" => event.name = Some(value.to_owned()),
            "retry" => event.retry = value.parse().ok(),
            "data" => {
                let data = event.data.get_or_insert_default();
                if !data.is_empty() {
                    data.push('\n');
                }
                data.push_str(value);
            }
            _ => {}
        }
    }
    events
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    // **Feature: unified-sidecar, Property 12: Serialization Round-Trip** (events)
    #[test]
    fn property_12_serialization_round_trip_of_events(
        id in prop::option::of("[a-zA-Z0-9:_-]{1,40}"),
        name in prop::option::of("[a-z]{1,12}"),
        retry in prop::option::of(any::<u32>()),
        data in "\\PC[^\\r\\n]{0,40}(\n[^\\r\\n]{1,40}){0,4}",
    ) {
        let event = Event { id: id.as_deref(), name: name.as_deref(), retry, data: Some(&data) };
        let written = format!("{KEEPALIVE}{}{}", event.write(), event.write());
        let parsed = parse(&written);
        let expected = ParsedEvent { id, name, retry, data: Some(data) };
        // The keepalive comment is parsed as an empty event.
        prop_assert_eq!(&parsed[0], &ParsedEvent::default());
        prop_assert_eq!(&parsed[1], &expected);
        prop_assert_eq!(&parsed[2], &expected);
    }
}

#[test]
fn data_lines_that_look_like_fields_stay_data() {
    let data = "one\nevent: endpoint\ndata: two\r\rid: 9\r\nthree";
    let event = Event {
        data: Some(data),
        ..Event::default()
    };
    let parsed = parse(&event.write());
    assert_eq!(parsed.len(), 1);
    assert_eq!(parsed[0].id, None);
    assert_eq!(parsed[0].name, None);
    assert_eq!(
        parsed[0].data.as_deref(),
        Some("one\nevent: endpoint\ndata: two\n\nid: 9\nthree")
    );
}
