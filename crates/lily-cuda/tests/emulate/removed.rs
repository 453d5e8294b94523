//! Kernels without one of the statements that order their threads.

/// Calls of these functions, one after another, each with its line.
pub fn calls<'a>(text: &'a str, functions: &'a [&str]) -> Vec<(usize, &'a str)> {
    let call = |(number, line): (usize, &'a str)| {
        // Not where they are defined.
        let calls = functions.iter().any(|f| at(line, f).is_some()) && !line.contains("__forceinline__");
        calls.then_some((number, line.trim()))
    };
    text.lines().enumerate().filter_map(call).collect()
}

/// Where a line calls a function.
fn at(line: &str, function: &str) -> Option<usize> {
    let code = line.split("//").next()?;
    code.find(&format!("{function}("))
        .filter(|&at| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'))
}

/// The text without the call in a line.
pub fn without(text: &str, number: usize, functions: &[&str]) -> String {
    let remove = |line: &str| {
        let at = functions.iter().find_map(|f| at(line, f)).unwrap();
        let mut depth = 0;
        let end = line[at..].find(|c| {
            depth += i32::from(c == '(') - i32::from(c == ')');
            c == ')' && depth == 0
        });
        format!("{}(void)0{}", &line[..at], &line[at + end.unwrap() + 1..])
    };
    let line = |(n, line): (usize, &str)| if n == number { remove(line) } else { line.to_owned() };
    text.lines().enumerate().map(|l| line(l) + "\n").collect()
}
