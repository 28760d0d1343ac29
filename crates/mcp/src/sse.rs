//! Writes server-sent events as the HTML standard defines them (section 9.2).

/// One event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Event<'a> {
    /// The id that a client sends as Last-Event-ID to resume after this event. One line.
    pub id: Option<&'a str>,
    /// The event name; `message` if omitted. One line.
    pub name: Option<&'a str>,
    /// How long a client waits before it reconnects, in milliseconds.
    pub retry: Option<u32>,
    /// The data, with any number of lines. Without data the client stores the id and dispatches no
    /// event.
    pub data: Option<&'a str>,
}

/// An empty comment that keeps the connection open and detects a disconnected client.
pub const KEEPALIVE: &str = ": \n\n";

impl Event<'_> {
    /// The event in wire format.
    pub fn write(&self) -> String {
        let length = self.data.map_or(0, str::len) + 64;
        let mut text = String::with_capacity(length);
        if let Some(name) = self.name {
            field(&mut text, "event", name);
        }
        if let Some(id) = self.id {
            field(&mut text, "id", id);
        }
        if let Some(retry) = self.retry {
            field(&mut text, "retry", &retry.to_string());
        }
        // A carriage return also ends a line in SSE. JSON has it only between tokens, where it means
        // the same as a line feed.
        if let Some(data) = self.data {
            for line in data.split('\n') {
                let line = line.strip_suffix('\r').unwrap_or(line);
                for line in line.split('\r') {
                    field(&mut text, "data", line);
                }
            }
        }
        text.push('\n');
        text
    }
}

fn field(text: &mut String, name: &str, value: &str) {
    text.push_str(name);
    text.push_str(": ");
    text.push_str(value);
    text.push('\n');
}

#[cfg(test)]
mod tests;
