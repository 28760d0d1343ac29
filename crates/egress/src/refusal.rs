//! What a sandbox hears whose traffic goes nowhere.

use policy::id::SandboxId;
use serde_json::json;

/// RFC 1035, section 4.1.1: 'the name server refuses to perform the operation'.
const REFUSED: u8 = 5;

/// The first byte of a TLS record that carries a handshake (RFC 8446, section 5.1).
const HANDSHAKE: u8 = 22;

/// A fatal `access_denied` alert (RFC 8446, section 6.2). Its version is what every client
/// takes before a version was agreed on.
const ACCESS_DENIED: [u8; 7] = [21, 3, 3, 0, 2, 2, 49];

/// The answer to a client that began with `first`, in the language it speaks.
pub fn answer(sandbox: &SandboxId, first: &[u8]) -> Vec<u8> {
    if first.first() == Some(&HANDSHAKE) {
        return ACCESS_DENIED.to_vec();
    }
    let body = json!({
        "error": format!(
            "Palisade refused this connection of sandbox '{sandbox}': nothing leaves it yet"
        ),
        "code": "refused",
        "sandbox": sandbox,
    })
    .to_string();
    format!(
        "HTTP/1.1 403 Forbidden\r\n\
         Content-Type: application/json\r\n\
         Content-Length: {}\r\n\
         Connection: close\r\n\
         \r\n\
         {body}\n",
        body.len() + 1
    )
    .into_bytes()
}

/// The answer to a DNS query: the same question, refused. `None` where nothing was asked.
pub fn answer_query(query: &[u8]) -> Option<Vec<u8>> {
    let header = query.get(..12)?;
    let [id_high, id_low, flags, ..] = *header else {
        return None;
    };
    // An answer is not answered, or two servers could talk for ever.
    if flags & 0x80 != 0 {
        return None;
    }
    // Opcode and 'recursion desired' as asked; every count but the question's is zero.
    let flags = [0x80 | (flags & 0x79), REFUSED];
    let question = question(query);
    let count = u8::from(!question.is_empty());
    let mut answer = vec![
        id_high, id_low, flags[0], flags[1], 0, count, 0, 0, 0, 0, 0, 0,
    ];
    answer.extend_from_slice(question);
    Some(answer)
}

/// The bytes of the one question, where there is one and it is whole and plain.
fn question(query: &[u8]) -> &[u8] {
    if query.get(4..6) != Some(&[0, 1]) {
        return &[];
    }
    let mut at = 12;
    loop {
        match query.get(at) {
            Some(0) => break,
            // A pointer in a question is none that we follow.
            Some(length) if *length < 64 => at += 1 + usize::from(*length),
            Some(_) | None => return &[],
        }
        if at > 12 + 255 {
            return &[];
        }
    }
    query.get(12..at + 5).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUERY: &[u8] = b"\x12\x34\x01\x20\0\x01\0\0\0\0\0\x01\x01x\x04test\0\0\x01\0\x01\0\0\x29";

    fn id() -> SandboxId {
        SandboxId::parse("fix-1").unwrap()
    }

    #[test]
    fn a_query_is_refused_with_its_own_question() {
        let answer = answer_query(QUERY).unwrap();
        assert_eq!(answer[..4], [0x12, 0x34, 0x81, 5]);
        assert_eq!(answer[4..12], [0, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(answer[12..], QUERY[12..24]);
    }

    #[test]
    fn what_is_no_query_is_left_alone_and_an_odd_one_loses_its_question() {
        assert_eq!(answer_query(b"short"), None);
        let mut answer = QUERY.to_vec();
        answer[2] |= 0x80;
        assert_eq!(answer_query(&answer), None, "it is an answer itself");
        for cut in 12..24 {
            let refused = answer_query(&QUERY[..cut]).unwrap();
            assert_eq!((refused.len(), refused[5]), (12, 0), "{cut}");
        }
        let mut pointer = QUERY.to_vec();
        pointer[12] = 0xc0;
        assert_eq!(answer_query(&pointer).unwrap().len(), 12);
    }

    #[test]
    fn a_tls_client_gets_an_alert_and_everybody_else_a_sentence() {
        assert_eq!(answer(&id(), &[22, 3, 1]), ACCESS_DENIED);
        for first in [&b"GET / HTTP/1.1\r\n"[..], b"", b"SSH-2.0"] {
            let text = String::from_utf8(answer(&id(), first)).unwrap();
            let (head, body) = text.split_once("\r\n\r\n").unwrap();
            assert!(head.starts_with("HTTP/1.1 403 Forbidden\r\n"), "{head}");
            assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())));
            assert!(body.contains("sandbox 'fix-1'"), "{body}");
        }
    }
}
