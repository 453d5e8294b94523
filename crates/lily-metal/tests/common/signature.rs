//! Reads the signatures of kernels from their text.

use lily_metal::plan::{LANES, MOST_BUFFERS, MOST_THREADS};

/// A kernel.
#[derive(Clone, Debug)]
pub struct Signature {
    pub name: String,
    /// Most threads of a threadgroup.
    pub threads: usize,
    pub parameters: Vec<Parameter>,
}

impl Signature {
    pub fn buffers(&self) -> usize {
        self.parameters.iter().filter(|p| matches!(p, Parameter::Buffer { .. })).count()
    }

    pub fn threadgroup_memory(&self) -> usize {
        self.parameters.iter().filter(|p| matches!(p, Parameter::Threadgroup { .. })).count()
    }

    /// Refuses what no Apple GPU since family 7 takes, and indices that are not those of the plan, which counts from 0.
    fn check(&self) -> Result<(), String> {
        let (mut buffers, mut memory) = (0, 0);
        for parameter in &self.parameters {
            let (what, index, next) = match parameter {
                Parameter::Buffer { index, .. } => ("buffer", *index, &mut buffers),
                Parameter::Threadgroup { index } => ("threadgroup", *index, &mut memory),
                Parameter::BuiltIn(_) => continue,
            };
            if index != *next || index >= MOST_BUFFERS {
                let Self { name, .. } = self;
                return Err(format!(
                    "kernel {name}: [[{what}({index})]], expected {next}, below {MOST_BUFFERS}"
                ));
            }
            *next += 1;
        }
        match self.threads {
            n if n > 0 && n.is_multiple_of(LANES) && n <= MOST_THREADS => Ok(()),
            n => Err(format!(
                "kernel {}: {n} threads, expected a multiple of {LANES}, at most {MOST_THREADS}",
                self.name
            )),
        }
    }
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
        let signature = Signature { name: name.to_owned(), threads, parameters };
        signature.check()?;
        out.push(signature);
    }
    let kernels =
        text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|w| *w == "kernel").count();
    match kernels == out.len() {
        true => Ok(out),
        false => Err(format!("{kernels} kernels, but {} of type void", out.len())),
    }
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
