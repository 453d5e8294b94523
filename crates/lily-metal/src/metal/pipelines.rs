//! Compiles kernels, and keeps what the GPU's own compiler made of them in a binary archive.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSArray, NSString, NSURL};
use objc2_metal::{
    MTLBinaryArchive, MTLBinaryArchiveDescriptor, MTLCompileOptions, MTLComputePipelineDescriptor,
    MTLComputePipelineState, MTLDevice, MTLLanguageVersion, MTLLibrary, MTLMathMode, MTLPipelineOption,
};

use super::{Object, words};
use crate::device::{DeviceError, Info, Pipeline};
use crate::source::Language;

/// A compiled kernel.
pub struct Kernel {
    /// Its name.
    pub name: &'static str,
    /// What is dispatched.
    pub state: Object<dyn MTLComputePipelineState>,
}

impl Kernel {
    /// What it allows.
    pub fn pipeline(&self) -> Pipeline {
        Pipeline {
            max_threads: self.state.maxTotalThreadsPerThreadgroup(),
            lanes: self.state.threadExecutionWidth(),
        }
    }
}

/// Compiled kernels on disk: read if there are any for this source, GPU and system, else written.
struct Archive {
    metal: Object<dyn MTLBinaryArchive>,
    file: PathBuf,
    is_new: bool,
}

fn url(file: &Path) -> objc2::rc::Retained<NSURL> {
    NSURL::fileURLWithPath(&NSString::from_str(&file.to_string_lossy()))
}

impl Archive {
    /// Without an archive kernels are compiled all the same, so what goes wrong is only logged.
    fn open(device: &ProtocolObject<dyn MTLDevice>, folder: &Path, key: u64) -> Option<Self> {
        let file = folder.join(format!("{key:016x}.metallib"));
        if let Err(error) = std::fs::create_dir_all(folder) {
            tracing::warn!("compiled kernels can't be kept in {}: {error}", folder.display());
            return None;
        }
        let make = |from: Option<&NSURL>| {
            let descriptor = MTLBinaryArchiveDescriptor::new();
            descriptor.setUrl(from);
            device.newBinaryArchiveWithDescriptor_error(&descriptor)
        };
        if file.is_file() {
            match make(Some(&url(&file))) {
                Ok(metal) => return Some(Self { metal, file, is_new: false }),
                Err(e) => tracing::warn!("{} is not used: {}", file.display(), words(&e)),
            }
        }
        match make(None) {
            Ok(metal) => Some(Self { metal, file, is_new: true }),
            Err(e) => {
                tracing::warn!("compiled kernels are not kept: {}", words(&e));
                None
            }
        }
    }

    fn add(&self, descriptor: &MTLComputePipelineDescriptor) {
        if self.is_new
            && let Err(e) = self.metal.addComputePipelineFunctionsWithDescriptor_error(descriptor)
        {
            tracing::warn!("a compiled kernel is not kept: {}", words(&e));
        }
    }

    /// Written beside and renamed, so that nobody reads half a file.
    fn save(&self) {
        if !self.is_new {
            return;
        }
        let part = self.file.with_extension(format!("{}.part", std::process::id()));
        let written = self.metal.serializeToURL_error(&url(&part)).map_err(|e| words(&e));
        let renamed = written.and_then(|()| std::fs::rename(&part, &self.file).map_err(|e| e.to_string()));
        if let Err(error) = renamed {
            tracing::warn!("compiled kernels can't be kept in {}: {error}", self.file.display());
        }
    }
}

/// Compiles source into one library, and each kernel into a pipeline.
pub fn compile(
    device: &ProtocolObject<dyn MTLDevice>,
    info: &Info,
    cache: Option<&Path>,
    source: &str,
    language: Language,
    kernels: &[&'static str],
) -> Result<Vec<Kernel>, DeviceError> {
    let options = MTLCompileOptions::new();
    options.setLanguageVersion(match language {
        Language::V3_1 => MTLLanguageVersion::Version3_1,
        Language::V4_0 => MTLLanguageVersion::Version4_0,
    });
    // The kernels use infinities and tell NaN apart.
    if objc2::available!(macos = 15.0) {
        options.setMathMode(MTLMathMode::Safe);
    } else {
        #[expect(deprecated, reason = "what came before macOS 15")]
        options.setFastMathEnabled(false);
    }
    let library = device
        .newLibraryWithSource_options_error(&NSString::from_str(source), Some(&options))
        .map_err(|e| DeviceError::Compile(words(&e)))?;
    let mut key = DefaultHasher::new();
    (source, &info.name, &info.details, env!("CARGO_PKG_VERSION")).hash(&mut key);
    let archive = cache.and_then(|folder| Archive::open(device, folder, key.finish()));
    let compiled = kernels.iter().map(|name| pipeline(device, &library, archive.as_ref(), name)).collect();
    if let Some(archive) = archive {
        archive.save();
    }
    compiled
}

fn pipeline(
    device: &ProtocolObject<dyn MTLDevice>,
    library: &ProtocolObject<dyn MTLLibrary>,
    archive: Option<&Archive>,
    name: &'static str,
) -> Result<Kernel, DeviceError> {
    let label = NSString::from_str(name);
    let what = || format!("pipeline for kernel {name}");
    let function = library.newFunctionWithName(&label);
    let function = function
        .ok_or_else(|| DeviceError::Missing { what: what(), why: "it is not in the library".to_owned() })?;
    let descriptor = MTLComputePipelineDescriptor::new();
    descriptor.setLabel(Some(&label));
    descriptor.setComputeFunction(Some(&function));
    if let Some(archive) = archive {
        descriptor.setBinaryArchives(Some(&NSArray::from_slice(&[&*archive.metal])));
    }
    let state = device
        .newComputePipelineStateWithDescriptor_options_reflection_error(
            &descriptor,
            MTLPipelineOption::None,
            None,
        )
        .map_err(|e| DeviceError::Missing { what: what(), why: words(&e) })?;
    if let Some(archive) = archive {
        archive.add(&descriptor);
    }
    Ok(Kernel { name, state })
}
