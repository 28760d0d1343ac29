use super::*;

const SHORT_TIMEOUT: Duration = Duration::from_millis(10);

fn text(outcome: ReadOutcome) -> String {
    match outcome {
        ReadOutcome::Message(message) => message.text.to_string(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn new_reader_gets_the_messages_after_the_last_read() {
    let event_buffer = Arc::new(EventBuffer::default());
    let mut first = event_buffer.open_reader(0);
    event_buffer.push("one".into()).await;
    event_buffer.push("two".into()).await;
    assert_eq!(text(first.next(SHORT_TIMEOUT).await), "one");
    drop(first);
    assert!(!event_buffer.has_reader());
    event_buffer.push("three".into()).await;
    let mut second = event_buffer.open_reader(1);
    assert_eq!(text(second.next(SHORT_TIMEOUT).await), "two");
    assert_eq!(text(second.next(SHORT_TIMEOUT).await), "three");
    assert_eq!(second.next(SHORT_TIMEOUT).await, ReadOutcome::TimedOut);
    event_buffer.finish("four".into());
    event_buffer.push("late".into()).await;
    assert_eq!(text(second.next(SHORT_TIMEOUT).await), "four");
    assert_eq!(second.next(SHORT_TIMEOUT).await, ReadOutcome::Closed);
}

#[tokio::test]
async fn message_goes_only_to_the_newest_reader() {
    let event_buffer = Arc::new(EventBuffer::default());
    let mut old = event_buffer.open_reader(0);
    let mut new = event_buffer.open_reader(0);
    event_buffer.push("one".into()).await;
    assert_eq!(old.next(SHORT_TIMEOUT).await, ReadOutcome::Closed);
    drop(old);
    assert!(
        event_buffer.has_reader(),
        "the newer reader is the current one"
    );
    assert_eq!(text(new.next(SHORT_TIMEOUT).await), "one");
}

#[tokio::test(start_paused = true)]
async fn full_buffer_blocks_with_a_reader_and_drops_oldest_without() {
    let event_buffer = Arc::new(EventBuffer::default());
    for number in 1..=MAX_MESSAGES + 5 {
        event_buffer.push(number.to_string()).await;
    }
    let mut reader = event_buffer.open_reader(0);
    let blocked = tokio::time::timeout(SHORT_TIMEOUT, event_buffer.push("more".into())).await;
    assert!(
        blocked.is_err(),
        "a full buffer blocks while it has a reader"
    );
    assert_eq!(text(reader.next(SHORT_TIMEOUT).await), "6");
    let ((), next) = tokio::join!(event_buffer.push("more".into()), reader.next(SHORT_TIMEOUT));
    assert_eq!(text(next), "7");
}

#[tokio::test(start_paused = true)]
async fn buffer_is_bounded_by_bytes() {
    let event_buffer = EventBuffer::default();
    for _ in 0..20 {
        event_buffer.push("x".repeat(1024 * 1024)).await;
    }
    assert!(event_buffer.lock().bytes <= MAX_BYTES);
    event_buffer.push("y".repeat(2 * MAX_BYTES)).await;
    assert_eq!(event_buffer.lock().messages.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn closed_buffer_expires_a_minute_after_its_last_reader() {
    let event_buffer = Arc::new(EventBuffer::default());
    let reader = event_buffer.open_reader(0);
    event_buffer.finish("bye".into());
    tokio::time::advance(RETENTION * 2).await;
    assert!(!event_buffer.is_expired(), "the buffer has a reader");
    drop(reader);
    assert!(!event_buffer.is_expired());
    tokio::time::advance(RETENTION + SHORT_TIMEOUT).await;
    assert!(event_buffer.is_expired());
}
