//! Fields of a JSON object, read one by one with errors that name them.

use serde_json::{Map, Value};

use crate::config::ConfigError;

/// An object of the file, and its path for messages.
pub(crate) struct Fields<'a> {
    pub path: String,
    pub map: &'a Map<String, Value>,
}

pub(crate) fn invalid(field: impl Into<String>, expected: impl Into<String>, found: &Value) -> ConfigError {
    ConfigError::Invalid { field: field.into(), expected: expected.into(), found: found.to_string() }
}

impl<'a> Fields<'a> {
    pub fn of(value: &'a Value, path: &str) -> Result<Self, ConfigError> {
        match value.as_object() {
            Some(map) => Ok(Self { path: path.to_owned(), map }),
            None => Err(invalid(if path.is_empty() { "the file" } else { path }, "an object", value)),
        }
    }

    pub fn name(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The value, unless absent or null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    pub fn need(&self, key: &str) -> Result<&'a Value, ConfigError> {
        self.get(key).ok_or_else(|| ConfigError::Missing(self.name(key)))
    }

    pub fn object(&self, key: &str) -> Result<Fields<'a>, ConfigError> {
        Fields::of(self.need(key)?, &self.name(key))
    }

    /// A count from 1 to 2^24: products of any two still fit 64 bits with room.
    pub fn size(&self, key: &str) -> Result<usize, ConfigError> {
        let value = self.need(key)?;
        match value.as_u64() {
            Some(n) if (1..=1 << 24).contains(&n) => Ok(n as usize),
            _ => Err(invalid(self.name(key), "a whole number from 1 to 16777216", value)),
        }
    }

    pub fn number(&self, key: &str) -> Result<f64, ConfigError> {
        let value = self.need(key)?;
        match value.as_f64() {
            Some(x) if x.is_finite() && x > 0.0 => Ok(x),
            _ => Err(invalid(self.name(key), "a number above 0", value)),
        }
    }

    pub fn bool(&self, key: &str) -> Result<bool, ConfigError> {
        let value = self.need(key)?;
        value.as_bool().ok_or_else(|| invalid(self.name(key), "true or false", value))
    }

    /// The model is defined for one value of this field only.
    pub fn only(&self, key: &str, expected: Value) -> Result<(), ConfigError> {
        let value = self.need(key)?;
        if *value == expected {
            return Ok(());
        }
        Err(invalid(self.name(key), format!("{expected} (Lily runs no other form)"), value))
    }

    /// As [`Fields::only`], but the field may be absent.
    pub fn only_if_present(&self, key: &str, expected: Value) -> Result<(), ConfigError> {
        if self.get(key).is_some() { self.only(key, expected) } else { Ok(()) }
    }

    /// One token id or a list of them; none if the field is absent.
    pub fn token_ids(&self, key: &str) -> Result<Vec<u32>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let ids = match value {
            Value::Array(list) => list.iter().map(id).collect(),
            one => id(one).map(|n| vec![n]),
        };
        ids.ok_or_else(|| invalid(self.name(key), "a token id or a list of them", value))
    }

    /// A number that passes `check`, or `default` if the field is absent.
    pub fn number_or(
        &self,
        key: &str,
        default: f32,
        expected: &str,
        check: impl Fn(f32) -> bool,
    ) -> Result<f32, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let number = value.as_f64().map(|x| x as f32).filter(|x| x.is_finite() && check(*x));
        number.ok_or_else(|| invalid(self.name(key), expected, value))
    }
}
