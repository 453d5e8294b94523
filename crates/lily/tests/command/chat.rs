use crate::{output_with_input, stderr, stdout};

#[test]
fn every_line_is_answered_until_the_end() {
    let done = output_with_input(&["chat", "-n", "4", "--no-think"], b"Hello\nAnd now?\n");
    assert!(stdout(&done).lines().count() >= 2, "{done:?}");
}

#[test]
fn commands_are_not_messages() {
    let done = output_with_input(&["chat", "-n", "4", "--no-think"], b"/help\n\n/clear\n/exit\nnever read\n");
    assert_eq!(stdout(&done), "");
}

#[test]
fn a_conversation_that_grows_too_long_goes_on_after_clear() {
    let args = ["chat", "-n", "4", "--no-think", "--ctx-size", "40", "--seed", "1"];
    let long = "one two three four five six seven eight nine ten ".repeat(5);
    let input = format!("Hello\n{long}\n/clear\nHello\n");
    let done = output_with_input(&args, input.as_bytes());
    let answer = output_with_input(&args, b"Hello\n");
    assert_eq!(stdout(&done), stdout(&answer).repeat(2), "{done:?}");
    assert!(stderr(&done).contains("but the context is 40 tokens"), "{done:?}");
}
