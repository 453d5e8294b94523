//! The kernels' text with what has to stand around it.

use super::signature::{Parameter, Signature};

/// How it is compiled: see `shim/metal_stdlib`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To run on the CPU.
    Cpu,
    /// For clang's errors only.
    Check,
    /// To run on an NVIDIA GPU.
    Cuda,
}

/// Headers that kernels may include, and what stands for them.
pub const HEADERS: [(&str, &str); 3] = [
    ("#include <metal_stdlib>", include_str!("../shim/metal_stdlib")),
    ("#include <metal_tensor>", include_str!("../shim/metal_tensor")),
    (
        "#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>",
        include_str!("../shim/MetalPerformancePrimitives/MetalPerformancePrimitives.h"),
    ),
];
const ENTRY: &str = include_str!("../shim/entry.h");

/// Whether a text has tensor operations, which only Metal 4 knows.
pub fn has_tensors(source: &str) -> bool {
    source.contains(HEADERS[1].0)
}

/// The standard of C++ that a text is compiled by. Metal 3 is C++14, which clang holds it to; Metal 4 is C++17, and takes a structure
/// as a template's argument, which is C++20.
pub fn standard(source: &str, way: Way) -> &'static str {
    match way {
        _ if has_tensors(source) => "c++20",
        Way::Cpu => "c++17",
        Way::Check | Way::Cuda => "c++14",
    }
}

/// How Metal, which is clang's C++, says that a loop is to be unrolled.
const UNROLL: &str = "#pragma clang loop unroll(full)";

/// A whole file of C++ or CUDA: the header, the kernels' text, and an entry point for each kernel, which passes it what its
/// attributes ask for. Lines of errors are those of the text.
pub fn whole(source: &str, signatures: &[Signature], way: Way) -> String {
    // The CPU's compiler gets the text as it is. The others don't take `[[threadgroup(0)]]`, as `threadgroup` is a macro.
    let bare = if way == Way::Cpu { source.to_owned() } else { without_attributes(source) };
    let entries: String = signatures.iter().map(|s| entry(s, way)).collect();
    match way {
        Way::Cpu | Way::Check => {
            // Before words are poisoned.
            let headers =
                HEADERS.iter().map(|(include, _)| *include).filter(|include| source.contains(include));
            let headers = headers.collect::<Vec<_>>().join("\n");
            format!("{headers}\n#include \"entry.h\"\n#line 1 \"lily.metal\"\n{bare}\n{entries}")
        }
        // NVRTC gets one text and no files.
        Way::Cuda => {
            let included = HEADERS.iter().filter(|(include, _)| source.contains(include));
            let texts = included.map(|(_, text)| *text).chain([ENTRY]);
            let header = texts.collect::<String>().replace("#pragma once", "");
            let bare = HEADERS.iter().fold(bare, |text, (include, _)| text.replace(include, ""));
            let bare = bare.replace(UNROLL, "#pragma unroll");
            format!(
                "namespace metal_text {{\n{header}\n#line 1 \"lily.metal\"\n{bare}\n}}  // namespace\n{entries}"
            )
        }
    }
}

fn entry(signature: &Signature, way: Way) -> String {
    let Signature { name, threads, parameters } = signature;
    let cuda = way == Way::Cuda;
    let scope = if cuda { "metal_text::" } else { "" };
    let pass = |parameter: &Parameter| match parameter {
        Parameter::Buffer { index, .. } if cuda => format!("{scope}shim::buffer(b{index})"),
        Parameter::Threadgroup { index } if cuda => format!("{scope}shim::threadgroup_memory(t{index})"),
        Parameter::Buffer { index, .. } => format!("shim::buffer({index})"),
        Parameter::Threadgroup { index } => format!("shim::threadgroup_memory({index})"),
        Parameter::BuiltIn(name) => format!("{scope}shim::{name}()"),
    };
    let call = format!("{scope}{name}({});", parameters.iter().map(pass).collect::<Vec<_>>().join(", "));
    match way {
        Way::Cpu => format!(
            "void entry_{name}() {{ {call} }}\nshim::Kernel kernel_{name}(\"{name}\", entry_{name});\n"
        ),
        Way::Check => format!("void entry_{name}() {{ {call} }}\n"),
        Way::Cuda => {
            // An address for each buffer, then where each threadgroup memory argument begins: see `gpu::enqueue`.
            let buffers = (0..signature.buffers()).map(|index| format!("void* b{index}"));
            let memory = (0..signature.threadgroup_memory()).map(|index| format!("unsigned int t{index}"));
            let declared = buffers.chain(memory).collect::<Vec<_>>().join(", ");
            format!(
                "extern \"C\" __global__ void __launch_bounds__({threads}) entry_{name}({declared}) {{ {call} }}\n"
            )
        }
    }
}

/// The text without `[[...]]`, its lines kept.
pub fn without_attributes(source: &str) -> String {
    let mut out = String::new();
    let mut rest = source;
    while let Some((before, after)) = rest.split_once("[[") {
        out.push_str(before);
        rest = after.split_once("]]").map_or("", |(_, after)| after);
    }
    out + rest
}
