//! Server-sent events, as the HTML standard writes them (9.2).

/// One event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Event<'a> {
    /// What a client shows when it wants to go on after this one. On one line.
    pub id: Option<&'a str>,
    /// Its name; `message` without one. On one line.
    pub name: Option<&'a str>,
    /// How long a client shall wait before it comes back, in milliseconds.
    pub retry: Option<u32>,
    /// What it says, on as many lines as it likes. None at all: the client takes the id and
    /// hears nothing.
    pub data: Option<&'a str>,
}

/// A line that says nothing, to see whether somebody is there.
pub const BREATH: &str = ": \n\n";

impl Event<'_> {
    /// As it stands on the wire.
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
        // A carriage return ends a line there, too; between the tokens of JSON it means
        // as much as a line feed, and it cannot stand within them.
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
