//! Reads the signatures of kernels from their text.

/// A kernel.
#[derive(Clone, Debug)]
pub struct Signature {
    pub name: String,
    /// Most threads of a threadgroup.
    pub threads: usize,
    pub parameters: Vec<Parameter>,
}

/// A parameter, by its attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parameter {
    /// `[[buffer(index)]]`; not `writable`: a pointer to const.
    Buffer { index: usize, writable: bool },
    /// `[[threadgroup(index)]]`.
    Threadgroup { index: usize },
    /// Anything else: a position or an index.
    BuiltIn(String),
}

/// All kernels, in their order.
pub fn signatures(source: &str) -> Result<Vec<Signature>, String> {
    let lines: Vec<&str> = source.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
    let text = lines.join("\n");
    let mut out = Vec::new();
    for (at, _) in text.match_indices("kernel void ") {
        let rest = &text[at + "kernel void ".len()..];
        let (name, rest) = rest.split_once('(').ok_or("a kernel without parameters")?;
        let (parameters, _) = rest.split_once(")\x20{").or_else(|| rest.split_once("\n)")).ok_or(name)?;
        let problem = |what: &str| format!("kernel {name}: {what}");
        let attribute = text[..at].trim_end();
        let threads = attribute
            .strip_suffix(")]]")
            .and_then(|text| text.rsplit_once("[[max_total_threads_per_threadgroup("))
            .and_then(|(_, n)| n.parse().ok())
            .ok_or_else(|| problem("how many threads?"))?;
        let parameters = parameters
            .split(",\n")
            .map(|text| parameter(text).ok_or_else(|| problem(text)))
            .collect::<Result<_, _>>()?;
        out.push(Signature { name: name.to_owned(), threads, parameters });
    }
    Ok(out)
}

fn parameter(text: &str) -> Option<Parameter> {
    let (declaration, attribute) = text.trim().strip_suffix("]]")?.split_once("[[")?;
    let index = |prefix: &str| attribute.strip_prefix(prefix)?.strip_suffix(')')?.parse().ok();
    if let Some(index) = index("buffer(") {
        let writable = !declaration.starts_with("const device ") && !declaration.starts_with("constant ");
        return Some(Parameter::Buffer { index, writable });
    }
    match index("threadgroup(") {
        Some(index) => Some(Parameter::Threadgroup { index }),
        None => Some(Parameter::BuiltIn(attribute.to_owned())),
    }
}
