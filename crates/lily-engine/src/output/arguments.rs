//! The arguments of a tool call as JSON, while they are being read.
//!
//! Templates write strings as they are and everything else as JSON, so the tool's schema must tell which a value
//! is. A string is sent as it comes. Anything else is sent when complete: as the JSON it is, or, if it isn't JSON
//! or not of a type that the schema allows beside strings, as a string of the same characters. A parameter without
//! a schema, or of a type that JSON schema doesn't know, may be of any type; text in quotes is then a string whose
//! quotes belong to it.

use std::collections::HashSet;

use serde_json::Value;

use super::Output;

/// The arguments of one call.
#[derive(Debug)]
pub(super) struct Arguments {
    call: u32,
    schema: Value,
    names: HashSet<String>,
    writer: Writer,
}

/// The value that is being read.
#[derive(Debug)]
enum Writer {
    /// None.
    Nothing,
    /// A string; its opening quote was sent.
    String,
    /// One that must be complete before its type is known.
    Buffered { types: Types, text: String },
    /// One that is dropped.
    Dropped,
}

impl Arguments {
    /// Of call `call`; `schema` is the tool's, or null.
    pub fn new(call: u32, schema: Value) -> Self {
        Self { call, schema, names: HashSet::new(), writer: Writer::Nothing }
    }

    /// A parameter begins.
    pub fn begin(&mut self, name: &str, output: &mut Output) {
        if !self.names.insert(name.to_owned()) {
            tracing::debug!(name, "a parameter of a tool call comes twice: the first one counts");
            self.writer = Writer::Dropped;
            return;
        }
        let separator = if self.names.len() == 1 { '{' } else { ',' };
        output.arguments(self.call, &format!("{separator}{}:", quoted(name)));
        let schema = self.schema.get("properties").and_then(|properties| properties.get(name));
        let types = schema.map_or(Types::ANY, |schema| Types::of(schema, &self.schema));
        self.writer = Writer::Buffered { types, text: String::new() };
        self.settle(output);
    }

    /// More of the value.
    pub fn push(&mut self, piece: &str, output: &mut Output) {
        match &mut self.writer {
            Writer::String => output.arguments(self.call, escaped(&quoted(piece))),
            Writer::Buffered { text, .. } => {
                text.push_str(piece);
                self.settle(output);
            }
            Writer::Nothing | Writer::Dropped => {}
        }
    }

    /// The value is complete.
    pub fn end(&mut self, output: &mut Output) {
        match std::mem::replace(&mut self.writer, Writer::Nothing) {
            Writer::String => output.arguments(self.call, "\""),
            Writer::Buffered { types, text } => output.arguments(self.call, &types.encode(&text)),
            Writer::Nothing | Writer::Dropped => {}
        }
    }

    /// The call is complete.
    pub fn finish(mut self, output: &mut Output) {
        self.end(output);
        output.arguments(self.call, if self.names.is_empty() { "{}" } else { "}" });
    }

    /// Goes over to sending a value as soon as it can only be a string.
    fn settle(&mut self, output: &mut Output) {
        if let Writer::Buffered { types, text } = &self.writer
            && types.only_string(text)
        {
            let json = quoted(text);
            output.arguments(self.call, &json[..json.len() - 1]);
            self.writer = Writer::String;
        }
    }
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn escaped(quoted: &str) -> &str {
    &quoted[1..quoted.len() - 1]
}

/// A set of JSON types.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Types(u8);

impl Types {
    pub(crate) const STRING: Self = Self(1);
    const INTEGER: Self = Self(2);
    const NUMBER: Self = Self(4);
    const BOOLEAN: Self = Self(8);
    const NULL: Self = Self(16);
    const OBJECT: Self = Self(32);
    const ARRAY: Self = Self(64);
    const ANY: Self = Self(127);

    /// References between schemas are followed so far.
    const MAX_DEPTH: usize = 16;
    /// A value that isn't a string begins within so many bytes, and is over soon after a keyword.
    const MAX_BLANK: usize = 64;

    /// What a schema allows; `root` is where its references point into.
    pub(crate) fn of(schema: &Value, root: &Value) -> Self {
        match Self::collect(schema, root, Self::MAX_DEPTH) {
            Self(0) => Self::ANY,
            types => types,
        }
    }

    fn collect(schema: &Value, root: &Value, depth: usize) -> Self {
        let Some(depth) = depth.checked_sub(1) else { return Self(0) };
        let nullable = if schema["nullable"] == true { Self::NULL } else { Self(0) };
        let union = |schemas: &Value, of: &dyn Fn(&Value) -> Self| {
            schemas.as_array().into_iter().flatten().fold(Self(0), |types, each| types.and(of(each)))
        };
        let own = match &schema["type"] {
            Value::String(name) => Self::named(name),
            names => union(names, &|name| name.as_str().map_or(Self(0), Self::named)),
        };
        if own != Self(0) {
            return own.and(nullable);
        }
        if let Some(target) = schema["$ref"].as_str().and_then(|r| root.pointer(r.strip_prefix('#')?)) {
            return Self::collect(target, root, depth).and(nullable);
        }
        let values = union(&schema["enum"], &Self::of_value);
        let constant = schema.get("const").map_or(Self(0), Self::of_value);
        let parts = ["anyOf", "oneOf", "allOf"]
            .map(|name| union(&schema[name], &|part| Self::collect(part, root, depth)))
            .into_iter()
            .fold(values.and(constant), Self::and);
        if parts == Self(0) { parts } else { parts.and(nullable) }
    }

    fn named(name: &str) -> Self {
        match name {
            "string" => Self::STRING,
            "integer" => Self::INTEGER,
            "number" => Self::NUMBER,
            "boolean" => Self::BOOLEAN,
            "null" => Self::NULL,
            "object" => Self::OBJECT,
            "array" => Self::ARRAY,
            _ => Self(0),
        }
    }

    fn of_value(value: &Value) -> Self {
        match value {
            Value::Null => Self::NULL,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Number(number) if number.is_f64() => Self::NUMBER,
            Value::Number(_) => Self::INTEGER,
            Value::String(_) => Self::STRING,
            Value::Array(_) => Self::ARRAY,
            Value::Object(_) => Self::OBJECT,
        }
    }

    fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether a value that begins like this can only be a string.
    fn only_string(self, text: &str) -> bool {
        if self == Self::STRING || !self.has(Self::STRING) {
            return self == Self::STRING;
        }
        let value = text.trim_start();
        if text.len() - value.len() > Self::MAX_BLANK {
            return true;
        }
        let keyword = |types, word: &str| {
            let fits = word.starts_with(value) || value.trim_end() == word;
            self.has(types) && value.len() <= Self::MAX_BLANK && fits
        };
        !match value.as_bytes().first() {
            None => true,
            Some(b'{') => self.has(Self::OBJECT),
            Some(b'[') => self.has(Self::ARRAY),
            Some(b'-' | b'0'..=b'9') => self.has(Self::INTEGER.and(Self::NUMBER)),
            Some(b't') => keyword(Self::BOOLEAN, "true"),
            Some(b'f') => keyword(Self::BOOLEAN, "false"),
            Some(b'n') => keyword(Self::NULL, "null"),
            Some(_) => false,
        }
    }

    /// The JSON of a complete value.
    fn encode(self, text: &str) -> String {
        let json = text.trim();
        let Ok(value) = serde_json::from_str::<Value>(json) else { return quoted(text) };
        let types = match Self::of_value(&value) {
            Self::STRING => return quoted(text),
            Self::INTEGER => Self::INTEGER.and(Self::NUMBER),
            Self::NUMBER if integral(&value).is_some() => Self::INTEGER.and(Self::NUMBER),
            types => types,
        };
        if self.has(Self::STRING) && !self.has(types) {
            return quoted(text);
        }
        match integral(&value) {
            Some(integer) if !self.has(Self::NUMBER) => integer.to_string(),
            _ => json.to_owned(),
        }
    }
}

/// The integer that a number with a fraction or an exponent is, if it is one and small enough to be exact.
pub(crate) fn integral(value: &Value) -> Option<i64> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let number = value.as_f64().filter(|number| value.is_f64() && number.fract() == 0.0)?;
    (number.abs() < EXACT).then_some(number as i64)
}
