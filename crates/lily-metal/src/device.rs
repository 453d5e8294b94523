//! What a backend asks of a GPU: memory, compiled kernels, and lists of launches that run in order. On macOS
//! [`crate::metal`] does it; where there is no Mac, a machine on the CPU does in the tests.

use lily_model::files::Bytes;

use crate::source::Language;

/// Memory of a device, for as long as the device lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferId(pub u32);

/// A compiled kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelId(pub u32);

/// Work that was handed over, with Metal a command buffer; later ones have larger numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Submission(pub u64);

/// A place in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which memory.
    pub buffer: BufferId,
    /// Bytes from its beginning.
    pub offset: usize,
}

impl Place {
    /// The place so many bytes further on.
    pub fn after(self, bytes: usize) -> Self {
        Self { offset: self.offset + bytes, ..self }
    }
}

/// What a device is.
#[derive(Clone, Debug)]
pub struct Info {
    /// Its name, for people.
    pub name: String,
    /// Bytes that it works well with, for everything.
    pub memory: u64,
    /// Bytes of the largest buffer.
    pub max_buffer: usize,
    /// What memory must be aligned to, to be used without a copy.
    pub page: usize,
    /// Whether it has units for the tensor operations of Metal 4, and a system that knows them.
    pub tensor: bool,
    /// What a report of a fault should say besides.
    pub details: Vec<(&'static str, String)>,
}

/// What a compiled kernel allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pipeline {
    /// Most threads of a threadgroup: fewer than the GPU's limit if it needs many registers.
    pub max_threads: usize,
    /// Threads of a SIMD-group.
    pub lanes: usize,
}

/// Words that a kernel may be given along with its launch.
pub const MOST_WORDS: usize = 8;

/// What a buffer argument is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    /// Memory.
    Place(Place),
    /// So many of these words themselves.
    Words([u32; MOST_WORDS], usize),
}

impl Argument {
    /// Words, if there are not too many.
    pub fn words(words: &[u32]) -> Option<Self> {
        let mut all = [0; MOST_WORDS];
        all.get_mut(..words.len())?.copy_from_slice(words);
        Some(Self::Words(all, words.len()))
    }

    /// Puts a word in the place of the last one, if these are words.
    pub fn set_last(&mut self, word: u32) {
        if let Self::Words(words, count) = self
            && let Some(last) = words[..*count].last_mut()
        {
            *last = word;
        }
    }
}

/// A kernel to run.
#[derive(Clone, Copy, Debug)]
pub struct Dispatch<'a> {
    /// Which.
    pub kernel: KernelId,
    /// Threadgroups.
    pub grid: [usize; 3],
    /// Threads of a threadgroup.
    pub threads: usize,
    /// Bytes of each threadgroup memory argument.
    pub threadgroup_memory: &'a [usize],
    /// What its buffer arguments are bound to, by index.
    pub arguments: &'a [Argument],
    /// Whether it waits for everything before it.
    pub barrier: bool,
}

/// Takes the parts of a submission, in order.
pub trait Encoder {
    /// A kernel. Those that no barrier parts may run together.
    fn dispatch(&mut self, dispatch: &Dispatch<'_>);
    /// A copy, behind everything before it and before everything after it.
    fn copy(&mut self, from: Place, to: Place, bytes: usize);
    /// Zeros, likewise.
    fn zero(&mut self, at: Place, bytes: usize);
}

/// A GPU. Submissions run one after the other.
pub trait Device: Send {
    /// What it is.
    fn info(&self) -> &Info;

    /// Compiles Metal source; its `kernels` can be found by name then, and those compiled before no more.
    fn compile(
        &mut self,
        source: &str,
        language: Language,
        kernels: &[&'static str],
    ) -> Result<(), DeviceError>;

    /// A compiled kernel.
    fn kernel(&self, name: &str) -> Option<(KernelId, Pipeline)>;

    /// Memory that host and device both reach. What is in it at first is not known.
    fn allocate(&mut self, bytes: usize, what: &'static str) -> Result<BufferId, DeviceError>;

    /// A mapped file as memory, not copied; kernels only read it. `mapping` comes from [`Bytes::mapping`].
    fn map(&mut self, mapping: &Bytes) -> Result<BufferId, DeviceError>;

    /// Keeps buffers where the device reaches them, for as long as it lives.
    fn keep_resident(&mut self, buffers: &[BufferId]) -> Result<(), DeviceError>;

    /// Copies memory to the host. No submission that is not waited for may write there.
    fn read(&self, at: Place, out: &mut [u8]);

    /// Copies memory from the host. No submission that is not waited for may touch it.
    fn write(&mut self, at: Place, bytes: &[u8]);

    /// Hands over work; `encode` says what.
    fn submit(&mut self, encode: &mut dyn FnMut(&mut dyn Encoder)) -> Result<Submission, DeviceError>;

    /// Waits for the end of work and says whether it went well. What was [`Device::retire`]d counts as well done.
    fn wait(&self, submission: Submission) -> Result<(), DeviceError>;

    /// Forgets submissions up to this one, whose outcomes nobody asks for any more.
    fn retire(&mut self, submission: Submission);
}

/// A device failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// There is none.
    #[error("there is no Metal device here: use --device cpu")]
    None,
    /// A call that gave nothing back.
    #[error("Metal has no {what}{}", reason(.why))]
    Missing {
        /// What was asked for.
        what: String,
        /// The system's words, if it had any.
        why: String,
    },
    /// Memory that could not be had.
    #[error("Metal has no {bytes} bytes of memory for {what}")]
    Memory {
        /// Bytes.
        bytes: usize,
        /// What for.
        what: &'static str,
    },
    /// The kernels' text was refused.
    #[error("Metal can't compile the kernels: {0}")]
    Compile(String),
    /// Work ended with an error.
    #[error("the GPU stopped its work: {0}")]
    Command(String),
}

fn reason(why: &str) -> String {
    if why.is_empty() { String::new() } else { format!(": {why}") }
}
