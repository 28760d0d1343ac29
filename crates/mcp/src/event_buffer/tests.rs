use super::*;

const SOON: Duration = Duration::from_millis(10);

fn text(heard: Heard) -> String {
    match heard {
        Heard::Said(said) => said.text.to_string(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_client_that_comes_back_hears_what_it_missed() {
    let event_buffer = Arc::new(EventBuffer::default());
    let mut first = event_buffer.read(0);
    event_buffer.push("one".into()).await;
    event_buffer.push("two".into()).await;
    assert_eq!(text(first.next(SOON).await), "one");
    drop(first);
    assert!(!event_buffer.is_read());
    event_buffer.push("three".into()).await;
    let mut second = event_buffer.read(1);
    assert_eq!(text(second.next(SOON).await), "two");
    assert_eq!(text(second.next(SOON).await), "three");
    assert_eq!(second.next(SOON).await, Heard::Nothing);
    event_buffer.finish("four".into());
    event_buffer.push("late".into()).await;
    assert_eq!(text(second.next(SOON).await), "four");
    assert_eq!(second.next(SOON).await, Heard::Over);
}

#[tokio::test]
async fn a_message_goes_to_one_connection() {
    let event_buffer = Arc::new(EventBuffer::default());
    let mut old = event_buffer.read(0);
    let mut new = event_buffer.read(0);
    event_buffer.push("one".into()).await;
    assert_eq!(old.next(SOON).await, Heard::Over);
    drop(old);
    assert!(event_buffer.is_read(), "the newer one reads on");
    assert_eq!(text(new.next(SOON).await), "one");
}

#[tokio::test(start_paused = true)]
async fn who_reads_slowly_slows_and_who_does_not_read_loses_the_oldest() {
    let event_buffer = Arc::new(EventBuffer::default());
    for number in 1..=MOST_MESSAGES + 5 {
        event_buffer.push(number.to_string()).await;
    }
    let mut reader = event_buffer.read(0);
    let blocked = tokio::time::timeout(SOON, event_buffer.push("more".into())).await;
    assert!(blocked.is_err(), "there is no room while somebody reads");
    assert_eq!(text(reader.next(SOON).await), "6");
    let (sent, heard) = tokio::join!(event_buffer.push("more".into()), reader.next(SOON));
    assert_eq!((sent, text(heard)), ((), "7".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn memory_is_bounded_by_bytes() {
    let event_buffer = EventBuffer::default();
    for _ in 0..20 {
        event_buffer.push("x".repeat(1024 * 1024)).await;
    }
    assert!(event_buffer.lock().bytes <= MOST_BYTES);
    event_buffer.push("y".repeat(2 * MOST_BYTES)).await;
    assert_eq!(event_buffer.lock().messages.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn it_is_spent_a_minute_after_the_last_reader() {
    let event_buffer = Arc::new(EventBuffer::default());
    let reader = event_buffer.read(0);
    event_buffer.finish("bye".into());
    tokio::time::advance(KEPT * 2).await;
    assert!(!event_buffer.is_spent(), "somebody reads");
    drop(reader);
    assert!(!event_buffer.is_spent());
    tokio::time::advance(KEPT + SOON).await;
    assert!(event_buffer.is_spent());
}
