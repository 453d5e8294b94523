//! Bars on standard error; nothing at all if that is not a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar that counts `unit`s.
pub fn counted(total: u64, what: &'static str, unit: &str) -> ProgressBar {
    bar(total, what, &format!("{{pos}}/{{len}} {unit}"))
}

/// A bar that counts bytes.
pub fn bytes(total: u64, what: &'static str) -> ProgressBar {
    bar(total, what, "{bytes}/{total_bytes} ({bytes_per_sec})")
}

fn bar(total: u64, what: &'static str, count: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(&format!("{{msg}} [{{bar:30}}] {count} {{eta}}"));
    let bar = ProgressBar::new(total).with_message(what);
    // The template is fixed and valid; without it there would still be a bar.
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// A sign of life with a text.
pub fn spinner() -> ProgressBar {
    let spinner = ProgressBar::new_spinner();
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}
