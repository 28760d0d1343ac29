use proptest::prelude::*;

use super::*;

/// An event as a client understands it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Heard {
    id: Option<String>,
    name: Option<String>,
    retry: Option<u32>,
    data: Option<String>,
}

/// Reads a stream as the standard says a client does.
fn hear(stream: &str) -> Vec<Heard> {
    let mut events = Vec::new();
    let mut heard = Heard::default();
    let stream = stream.replace("\r\n", "\n").replace('\r', "\n");
    for line in stream.lines() {
        if line.is_empty() {
            events.push(std::mem::take(&mut heard));
            continue;
        }
        let (name, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match name {
            "id" => heard.id = Some(value.to_owned()),
            "event" => heard.name = Some(value.to_owned()),
            "retry" => heard.retry = value.parse().ok(),
            "data" => {
                let data = heard.data.get_or_insert_default();
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
        let written = format!("{BREATH}{}{}", event.write(), event.write());
        let heard = hear(&written);
        let expected = Heard { id, name, retry, data: Some(data) };
        // The breath is an event that says nothing.
        prop_assert_eq!(&heard[0], &Heard::default());
        prop_assert_eq!(&heard[1], &expected);
        prop_assert_eq!(&heard[2], &expected);
    }
}

#[test]
fn what_looks_like_a_field_stays_data() {
    let sly = "one\nevent: endpoint\ndata: two\r\rid: 9\r\nthree";
    let event = Event {
        data: Some(sly),
        ..Event::default()
    };
    let heard = hear(&event.write());
    assert_eq!(heard.len(), 1);
    assert_eq!(heard[0].id, None);
    assert_eq!(heard[0].name, None);
    assert_eq!(
        heard[0].data.as_deref(),
        Some("one\nevent: endpoint\ndata: two\n\nid: 9\nthree")
    );
}
