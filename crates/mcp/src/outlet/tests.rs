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
    let outlet = Arc::new(Outlet::default());
    let mut first = outlet.read(0);
    outlet.push("one".into()).await;
    outlet.push("two".into()).await;
    assert_eq!(text(first.next(SOON).await), "one");
    drop(first);
    assert!(!outlet.is_read());
    outlet.push("three".into()).await;
    let mut second = outlet.read(1);
    assert_eq!(text(second.next(SOON).await), "two");
    assert_eq!(text(second.next(SOON).await), "three");
    assert_eq!(second.next(SOON).await, Heard::Nothing);
    outlet.finish("four".into());
    outlet.push("late".into()).await;
    assert_eq!(text(second.next(SOON).await), "four");
    assert_eq!(second.next(SOON).await, Heard::Over);
}

#[tokio::test]
async fn a_message_goes_to_one_connection() {
    let outlet = Arc::new(Outlet::default());
    let mut old = outlet.read(0);
    let mut new = outlet.read(0);
    outlet.push("one".into()).await;
    assert_eq!(old.next(SOON).await, Heard::Over);
    drop(old);
    assert!(outlet.is_read(), "the newer one reads on");
    assert_eq!(text(new.next(SOON).await), "one");
}

#[tokio::test(start_paused = true)]
async fn who_reads_slowly_slows_and_who_does_not_read_loses_the_oldest() {
    let outlet = Arc::new(Outlet::default());
    for number in 1..=MOST_MESSAGES + 5 {
        outlet.push(number.to_string()).await;
    }
    let mut reader = outlet.read(0);
    let blocked = tokio::time::timeout(SOON, outlet.push("more".into())).await;
    assert!(blocked.is_err(), "there is no room while somebody reads");
    assert_eq!(text(reader.next(SOON).await), "6");
    let (sent, heard) = tokio::join!(outlet.push("more".into()), reader.next(SOON));
    assert_eq!((sent, text(heard)), ((), "7".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn memory_is_bounded_by_bytes() {
    let outlet = Outlet::default();
    for _ in 0..20 {
        outlet.push("x".repeat(1024 * 1024)).await;
    }
    assert!(outlet.lock().bytes <= MOST_BYTES);
    outlet.push("y".repeat(2 * MOST_BYTES)).await;
    assert_eq!(outlet.lock().messages.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn it_is_spent_a_minute_after_the_last_reader() {
    let outlet = Arc::new(Outlet::default());
    let reader = outlet.read(0);
    outlet.finish("bye".into());
    tokio::time::advance(KEPT * 2).await;
    assert!(!outlet.is_spent(), "somebody reads");
    drop(reader);
    assert!(!outlet.is_spent());
    tokio::time::advance(KEPT + SOON).await;
    assert!(outlet.is_spent());
}
