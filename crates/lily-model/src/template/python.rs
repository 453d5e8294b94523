//! What Jinja2 under Python does and minijinja does not, as far as chat templates can see it.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

use super::Refusal;

/// An environment that behaves like Hugging Face's.
pub(super) fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_debug(false);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(print);
    environment.add_filter("tojson", to_json);
    environment.add_filter("trim", |text: &str| strip(text).to_string());
    environment.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        let refusal = Refusal(message.to_string());
        Err(Error::new(ErrorKind::InvalidOperation, "the template raised an exception").with_source(refusal))
    });
    environment.add_function("strftime_now", |format: &str| {
        jiff::fmt::strtime::format(format, &jiff::ZonedDateTime::now())
            .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {e}")))
    });
    Ok(environment)
}

/// `str.strip`.
pub(super) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// `str.isspace`: Python counts four control characters as white space that Unicode does not.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\x1c'..='\x1f')
}

/// Prints a value as `str` does.
fn print(out: &mut Output<'_>, _: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    let text = match value.kind() {
        ValueKind::Undefined => "",
        ValueKind::None => "None",
        ValueKind::Bool if value.is_true() => "True",
        ValueKind::Bool => "False",
        ValueKind::String => value.as_str().unwrap_or_default(),
        ValueKind::Number if value.is_integer() => return Ok(write!(out, "{value}")?),
        ValueKind::Number => return Ok(out.write_str(&float(f64::try_from(value.clone())?))?),
        kind => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("the template prints a {kind} where text was expected"),
            ));
        }
    };
    Ok(out.write_str(text)?)
}

/// `json.dumps(value, ensure_ascii=False)`.
fn to_json(value: &Value) -> Result<String, Error> {
    let fail = |what: String| Error::new(ErrorKind::InvalidOperation, format!("tojson: {what}"));
    if value.is_undefined() {
        return Err(fail("the value is undefined".into()));
    }
    let mut json = Vec::new();
    value
        .serialize(&mut Serializer::with_formatter(&mut json, PythonFormatter))
        .map_err(|e| fail(e.to_string()))?;
    String::from_utf8(json).map_err(|e| fail(e.to_string()))
}

struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }
    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }
    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
    fn write_f64<W: ?Sized + std::io::Write>(&mut self, out: &mut W, value: f64) -> std::io::Result<()> {
        out.write_all(float(value).as_bytes())
    }
}

/// `repr` of a finite float: the shortest digits that read back the same, with an exponent below 1e-4 and from
/// 1e16.
fn float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(exponent) if !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => {
            let plain = value.to_string();
            if plain.contains('.') { plain } else { plain + ".0" }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_in_python() {
        let cases = [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.2345e22, "1.2345e+22"),
            (f64::MAX, "1.7976931348623157e+308"),
            (5e-324, "5e-324"),
            (123456789.125, "123456789.125"),
        ];
        for (value, expected) in cases {
            assert_eq!(float(value), expected);
        }
    }
}
