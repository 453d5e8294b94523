//! Reading the members of a JSON object, with errors that name the field, what was expected and what was
//! found. `null` is the same as an absent member, as in OpenAI's API.

use std::fmt::Write;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::error::ApiError;

/// Longest piece of a wrong value that an error repeats, characters.
const QUOTED: usize = 60;

/// A field, the JSON texts of the values that it may have, and why no other.
pub(crate) type OneValue = (&'static str, &'static [&'static str], &'static str);

/// A JSON object that is being read.
pub(crate) struct Fields<'a> {
    /// Where it is in the request; empty for the request itself.
    path: String,
    members: &'a Map<String, Value>,
    known: Vec<&'static str>,
}

impl<'a> Fields<'a> {
    /// The request body itself.
    pub fn body(members: &'a Map<String, Value>) -> Self {
        Self { path: String::new(), members, known: Vec::new() }
    }

    /// A nested object.
    pub fn nested(path: String, value: &'a Value) -> Result<Self, ApiError> {
        let members = value.as_object().ok_or_else(|| expected(&path, "an object", value))?;
        Ok(Self { path, members, known: Vec::new() })
    }

    /// Path of a member, as errors name it.
    pub fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// A member is known, whether it is there or not.
    fn note(&mut self, name: &'static str) {
        #[cfg(test)]
        crate::openapi::tests::record(self.path(name));
        self.known.push(name);
    }

    /// A member of any kind.
    pub fn any(&mut self, name: &'static str) -> Option<&'a Value> {
        self.note(name);
        self.members.get(name).filter(|value| !value.is_null())
    }

    /// A member read by `read`, which returns `None` for what is not `what`.
    fn typed<T>(
        &mut self,
        name: &'static str,
        what: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.any(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| expected(&self.path(name), what, value))
    }

    /// `true` or `false`.
    pub fn boolean(&mut self, name: &'static str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    /// A string.
    pub fn string(&mut self, name: &'static str) -> Result<Option<&'a str>, ApiError> {
        self.typed(name, "a string", Value::as_str)
    }

    /// One of some strings.
    pub fn one_of(&mut self, name: &'static str, values: &[&str]) -> Result<Option<&'a str>, ApiError> {
        let read = |value: &'a Value| value.as_str().filter(|text| values.contains(text));
        self.typed(name, &format!("one of {}", values.join(", ")), read)
    }

    /// A number within bounds.
    pub fn number(
        &mut self,
        name: &'static str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f32>, ApiError> {
        let what = format!("a number from {} to {}", range.start(), range.end());
        let read = |value: &Value| value.as_f64().filter(|x| range.contains(x)).map(|x| x as f32);
        self.typed(name, &what, read)
    }

    /// An integer within bounds.
    pub fn integer(
        &mut self,
        name: &'static str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let what = format!("an integer from {} to {}", range.start(), range.end());
        self.typed(name, &what, |value| value.as_i64().filter(|x| range.contains(x)))
    }

    /// An array.
    pub fn array(&mut self, name: &'static str) -> Result<Option<&'a [Value]>, ApiError> {
        self.typed(name, "an array", |value| value.as_array().map(Vec::as_slice))
    }

    /// An object, as it is.
    pub fn map(&mut self, name: &'static str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.typed(name, "an object", Value::as_object)
    }

    /// An object, to be read further.
    pub fn object(&mut self, name: &'static str) -> Result<Option<Fields<'a>>, ApiError> {
        let path = self.path(name);
        self.any(name).map(|value| Fields::nested(path, value)).transpose()
    }

    /// The error for an absent member.
    pub fn missing(&self, name: &str) -> ApiError {
        ApiError::field(self.path(name), "required, but absent").with_code("missing_required_parameter")
    }

    /// The end of a request's own fields: `model` may name anything, fields that are honoured for some values only
    /// have one of these, and labels have no effect.
    pub fn settle(mut self, one_value: &[OneValue], no_effect: &[&'static str]) -> Result<(), ApiError> {
        if let Some(model) = self.string("model")? {
            tracing::debug!(model, "the one model of this server answers, whatever the name");
        }
        for &(name, accepted, why) in one_value {
            let Some(value) = self.any(name) else { continue };
            if !accepted.contains(&value.to_string().as_str()) {
                let found = quote(value);
                let problem = match accepted {
                    [] => format!("not supported: {why}"),
                    _ => format!("only {} is supported, found {found}: {why}", accepted.join(" or ")),
                };
                return Err(ApiError::unsupported(self.path(name), problem));
            }
        }
        for name in no_effect {
            self.note(name);
        }
        self.finish();
        Ok(())
    }

    /// All has been read: what is left is ignored, with a log line.
    pub fn finish(self) {
        for (name, value) in self.members {
            if !self.known.contains(&name.as_str()) {
                tracing::debug!(field = self.path(name), value = quote(value), "unknown field ignored");
            }
        }
    }
}

/// The error for a value of the wrong kind.
pub(crate) fn expected(path: &str, what: &str, found: &Value) -> ApiError {
    ApiError::field(path, format!("expected {what}, found {}", quote(found)))
}

/// A value for an error message: short.
pub(crate) fn quote(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("an array of {}", items.len()),
        Value::Object(_) => "an object".to_owned(),
        Value::String(text) if text.chars().nth(QUOTED).is_some() => {
            let mut start: String = text.chars().take(QUOTED).collect();
            let _ = write!(start, "... ({} bytes)", text.len());
            Value::String(start).to_string()
        }
        scalar => scalar.to_string(),
    }
}
