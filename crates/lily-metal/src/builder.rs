//! A plan in the making: buffers, what launches are bound to, stages.

use std::collections::HashMap;
use std::ops::Range;

use lily_model::config::Config;
use lily_model::manifest::Module;

use crate::draw;
use crate::plan::{
    Access, Binding, Buffer, Contents, Features, GROUP, LANES, Launch, PAGE, Plan, SETTLE_EVERY, Segment,
    State,
};

/// Bytes of a number.
pub const F32: usize = 4;
pub const F16: usize = 2;
/// Rows of the largest tile of tensor operations.
pub const TENSOR_ROWS: usize = 64;
/// Positions that `attend_rows` takes at a time: `POSITIONS` of `attention.metal`. Pages are whole blocks.
pub const POSITIONS: usize = 32;

/// A plan in the making.
pub struct Builder<'a> {
    pub config: &'a Config,
    pub segments: &'a [Segment],
    pub features: Features,
    modules: HashMap<String, Module>,
    plan: Plan,
    index: HashMap<(usize, Contents), usize>,
    /// Which launches touched each buffer.
    touched: Vec<Vec<Touched>>,
}

/// A part of a buffer that a launch reads or writes.
struct Touched {
    range: Range<usize>,
    access: Access,
    stage: usize,
}

/// What a launch is bound to, in the order of its argument table.
pub struct Bindings<'b, 'a> {
    pub builder: &'b mut Builder<'a>,
    pub list: Vec<Binding>,
}

impl<'a> Builder<'a> {
    /// Nothing yet.
    pub fn new(
        config: &'a Config,
        modules: Vec<Module>,
        segments: &'a [Segment],
        features: Features,
    ) -> Self {
        let modules = modules.into_iter().map(|module| (module.name.clone(), module)).collect();
        let plan = Plan { buffers: Vec::new(), launches: Vec::new() };
        Self { config, segments, modules, features, plan, index: HashMap::new(), touched: Vec::new() }
    }

    /// The whole, stage by stage, so that there is a barrier for each stage and no more: segments' launches are made one after another.
    pub fn finish(mut self) -> Plan {
        self.plan.launches.sort_by_key(|launch| launch.stage);
        self.plan
    }

    /// The tokens of a segment among those of the step.
    pub fn rows(&self, segment: usize) -> Range<usize> {
        let first = self.segments[..segment].iter().map(|s| s.tokens).sum();
        first..first + self.segments[segment].tokens
    }

    /// All tokens of the step.
    pub fn all_rows(&self) -> Range<usize> {
        0..self.segments.iter().map(|s| s.tokens).sum()
    }

    /// The tokens from the first to the last that logits are wanted of: what comes behind the state of the last layer is for them alone.
    pub fn wanted_rows(&self) -> Range<usize> {
        let wanted = |segment: usize| {
            let rows = self.rows(segment);
            rows.end - self.segments[segment].want.rows(rows.len())..rows.end
        };
        let wanted = (0..self.segments.len()).map(wanted).filter(|rows| !rows.is_empty());
        wanted.reduce(|first, last| first.start..last.end).unwrap_or(0..0)
    }

    /// Bits of a matrix's codes; 16: values of bf16.
    pub fn bits(&self, name: &str) -> usize {
        let affine = self.modules.get(name).and_then(|module| module.affine(self.config));
        affine.map_or(16, |affine| affine.bits)
    }

    /// Groups of logits: `DRAW_GROUPS` of `sample.metal`.
    pub fn draw_groups(&self) -> usize {
        self.config.vocab_size.div_ceil(draw::GROUP)
    }

    fn buffer(&mut self, segment: usize, contents: Contents, bytes: usize) -> usize {
        let key = (segment, contents);
        if let Some(&buffer) = self.index.get(&key) {
            // A scratch buffer is as large as its largest use.
            let known = &mut self.plan.buffers[buffer].bytes;
            *known = bytes.max(*known);
            return buffer;
        }
        self.plan.buffers.push(Buffer { contents: key.1.clone(), bytes, segment });
        self.touched.push(Vec::new());
        let buffer = self.plan.buffers.len() - 1;
        self.index.insert(key, buffer);
        buffer
    }

    pub fn bind(&mut self) -> Bindings<'_, 'a> {
        Bindings { builder: self, list: Vec::new() }
    }

    /// Adds a launch; its stage follows from what it reads and writes.
    pub fn launch(
        &mut self,
        kernel: &'static str,
        grid: [usize; 3],
        threads: usize,
        threadgroup_memory: Vec<usize>,
        bindings: Vec<Binding>,
    ) {
        let before = bindings.iter().flat_map(|b| {
            let range = b.range();
            self.touched[b.buffer].iter().filter(move |t| {
                let apart = t.range.end <= range.start || range.end <= t.range.start;
                !apart && (t.access.writes() || b.access.writes())
            })
        });
        let stage = 1 + before.map(|t| t.stage).max().unwrap_or(0);
        for b in &bindings {
            self.touched[b.buffer].push(Touched { range: b.range(), access: b.access, stage });
        }
        self.plan.launches.push(Launch { kernel, grid, threads, threadgroup_memory, bindings, stage });
    }
}

impl Builder<'_> {
    /// Lets the last launch wait as long as the one before it does: it is ready sooner, but would only take time from what others
    /// wait for.
    pub fn delay_last(&mut self) {
        let [.., before, last] = &mut self.plan.launches[..] else { return };
        last.stage = last.stage.max(before.stage);
        for b in &last.bindings {
            if let Some(touched) = self.touched[b.buffer].last_mut() {
                touched.stage = last.stage;
            }
        }
    }
}

/// Bytes of a buffer that a launch touches; it is bound to their beginning. None go to or come from memory.
fn touched(buffer: usize, access: Access, bytes: Range<usize>) -> Binding {
    Binding {
        buffer,
        access,
        bytes: 0,
        bytes_per_position: 0,
        multiply_adds: 0,
        multiply_adds_per_position: 0,
        offset: bytes.start,
        length: bytes.len(),
    }
}

impl Bindings<'_, '_> {
    /// A buffer of a segment of which `moved` bytes go to or come from memory.
    fn of_segment(
        mut self,
        segment: usize,
        contents: Contents,
        bytes: usize,
        access: Access,
        moved: usize,
    ) -> Self {
        let buffer = self.builder.buffer(segment, contents, bytes);
        self.list.push(Binding { bytes: moved as u64, ..touched(buffer, access, 0..bytes) });
        self
    }

    /// With so many multiplications with what is in the last buffer.
    fn times(mut self, multiply_adds: usize) -> Self {
        if let Some(last) = self.list.last_mut() {
            last.multiply_adds = multiply_adds as u64;
        }
        self
    }

    /// As [`Self::of_segment`], of one that all segments share.
    fn moved(self, contents: Contents, bytes: usize, access: Access, moved: usize) -> Self {
        self.of_segment(0, contents, bytes, access, moved)
    }

    /// A buffer that stays in the caches.
    pub fn small(self, contents: Contents, bytes: usize, access: Access) -> Self {
        self.moved(contents, bytes, access, 0)
    }

    /// As [`Self::small`], of a segment.
    pub fn small_of(self, segment: usize, contents: Contents, bytes: usize, access: Access) -> Self {
        self.of_segment(segment, contents, bytes, access, 0)
    }

    /// Words that the kernel gets from the plan.
    pub fn numbers(self, numbers: &[usize]) -> Self {
        let words: Vec<u32> = numbers.iter().map(|&n| n as u32).collect();
        let bytes = words.len() * F32;
        self.small(Contents::Numbers(words), bytes, Access::Read)
    }

    /// Bytes `range` of a buffer that stays in the caches; the launch is bound to their beginning.
    pub fn part(mut self, contents: Contents, range: Range<usize>, access: Access) -> Self {
        let buffer = self.builder.buffer(0, contents, range.end);
        self.list.push(touched(buffer, access, range));
        self
    }

    /// Rows of numbers of four bytes, `width` a row.
    pub fn scratch(self, name: &'static str, width: usize, rows: &Range<usize>, access: Access) -> Self {
        let row = width * F32;
        self.part(Contents::Scratch(name), rows.start * row..rows.end * row, access)
    }

    /// Rows of halves, `width` a row. Tensor operations read whole tiles of them, and use nothing of what is behind the last row: for
    /// that there is room.
    pub fn halves(self, name: &'static str, width: usize, rows: &Range<usize>, access: Access) -> Self {
        let row = width * F16;
        let contents = Contents::Scratch(name);
        self.builder.buffer(0, contents.clone(), (rows.end + TENSOR_ROWS) * row);
        self.part(contents, rows.start * row..rows.end * row, access)
    }

    /// The residual stream.
    pub fn x(self, rows: &Range<usize>, access: Access) -> Self {
        let width = self.builder.config.hidden_size;
        self.scratch("x", width, rows, access)
    }

    /// Rows of queries in the type of the cache.
    pub fn packed_queries(self, rows: &Range<usize>, access: Access) -> Self {
        let row = self.builder.config.attention.query_width() * self.builder.features.kv.size();
        self.part(Contents::Scratch("q"), rows.start * row..rows.end * row, access)
    }

    /// The tokens of a segment.
    pub fn tokens(self, segment: usize, access: Access) -> Self {
        let bytes = self.builder.segments[segment].tokens * F32;
        self.small_of(segment, Contents::Token, bytes, access)
    }

    /// The position of a segment's sequence.
    pub fn position(self, segment: usize, access: Access) -> Self {
        self.small_of(segment, Contents::Position, F32, access)
    }

    /// How a segment's next token is drawn, and the first candidate of each group of logits, with what else the draw may need.
    pub fn candidates(self, segment: usize) -> Self {
        let (vocab, capacity) = (self.builder.config.vocab_size, self.builder.segments[segment].capacity);
        let changes = draw::most_changes(vocab, capacity) * draw::CHANGE_WORDS * F32;
        self.draw(segment)
            .small_of(segment, Contents::Changes, changes, Access::Read)
            .small_of(segment, Contents::Mask, draw::mask_words(vocab) * F32, Access::Read)
            .tokens(segment, Access::Read)
            .scratch("adjusted", vocab, &(segment..segment + 1), Access::Write)
            .best(segment, Access::Write)
    }

    /// How a segment's next token is drawn.
    pub fn draw(self, segment: usize) -> Self {
        self.small_of(segment, Contents::Draw, draw::WORDS * F32, Access::Read)
    }

    /// The first candidate of each group of a segment's logits.
    pub fn best(self, segment: usize, access: Access) -> Self {
        let words = self.builder.draw_groups() * draw::BEST_WORDS;
        self.scratch("best", words, &(segment..segment + 1), access)
    }

    /// Inputs of the convolution of a Gated DeltaNet layer, of which `moved` are read or written.
    pub fn conv(self, segment: usize, layer: usize, access: Access, moved: usize) -> Self {
        let g = &self.builder.config.gdn;
        let bytes = g.conv_channels() * g.conv_kernel * F32;
        self.of_segment(segment, Contents::State(layer, State::Conv), bytes, access, moved * F32)
    }

    /// Recurrent state of a Gated DeltaNet layer, its log, used as `log` says, and the number of pending tokens. What is moved and
    /// multiplied is the mean of such steps one behind the other.
    pub fn recurrent(self, segment: usize, layer: usize, log: Access) -> Self {
        let (g, tokens) = (&self.builder.config.gdn, self.builder.segments[segment].tokens);
        let (state, pending) = (g.state_len() * F32, g.value_width() / LANES * F32);
        let entry = (g.key_heads * g.key_dim + g.value_width() + g.value_heads) * F32;
        // Of so many steps all but the last add to the log, and all read what those before them added; the last writes the state.
        let steps = SETTLE_EVERY.div_ceil(tokens);
        let (added, read) = (tokens * (steps - 1), tokens * steps * (steps - 1) / 2);
        let of = |state| Contents::State(layer, state);
        self.of_segment(segment, of(State::Recurrent), state, Access::ReadWrite, state + state / steps)
            // With each value: four times for a token, twice for one that is replayed.
            .times((4 * tokens + 2 * read / steps) * g.state_len())
            .of_segment(
                segment,
                of(State::Log),
                (SETTLE_EVERY - 1) * entry,
                log,
                (added + read) * entry / steps,
            )
            .of_segment(segment, of(State::Pending), pending, Access::ReadWrite, 2 * pending)
    }

    /// The pages of a segment's sequence.
    pub fn pages(self, segment: usize) -> Self {
        let pages = self.builder.segments[segment].capacity.div_ceil(PAGE);
        self.small_of(segment, Contents::Pages, pages * F32, Access::Read)
    }

    /// What norms and rotation of a segment's heads read: projections, gains, angles and the position.
    pub fn heads(self, segment: usize, layer: usize, rows: &Range<usize>) -> Self {
        let a = &self.builder.config.attention;
        let (query_width, kv_width, turns) = (a.query_width(), a.kv_width(), a.rotary_dim / 2 * 8);
        self.scratch("queries", 2 * query_width, rows, Access::Read)
            .scratch("new_keys", kv_width, rows, Access::Read)
            .scratch("new_values", kv_width, rows, Access::Read)
            .vector(&format!("layers.{layer}.self_attn.q_norm"))
            .vector(&format!("layers.{layer}.self_attn.k_norm"))
            .small(Contents::Turns, turns, Access::Read)
            .position(segment, Access::Read)
    }

    /// Keys or values of a layer. The segment's positions are written, if `append`; the earlier ones are read, if `attend`.
    pub fn cache(mut self, segment: usize, layer: usize, state: State, append: bool, attend: bool) -> Self {
        let Segment { tokens, capacity, .. } = self.builder.segments[segment];
        let a = &self.builder.config.attention;
        let (position, query_width) = (a.kv_width() * self.builder.features.kv.size(), a.query_width());
        let length = capacity.next_multiple_of(PAGE) * position;
        let buffer = self.builder.buffer(segment, Contents::State(layer, state), length);
        let access = match (append, attend) {
            (true, true) => Access::ReadWrite,
            (true, false) => Access::Write,
            _ => Access::Read,
        };
        let per_position = tokens * query_width * usize::from(attend);
        self.list.push(Binding {
            bytes: (tokens * position * usize::from(append)) as u64,
            bytes_per_position: (position * usize::from(attend)) as u64,
            // A token meets half of the step's own on average.
            multiply_adds: (per_position * tokens.div_ceil(2)) as u64,
            multiply_adds_per_position: per_position as u64,
            ..touched(buffer, access, 0..length)
        });
        self
    }

    /// Values of a module. A name that isn't one gives none, which the tests of the plan's sizes find.
    fn elements(&self, name: &str) -> usize {
        self.builder.modules.get(name).map_or(0, |module| module.elements() as usize)
    }

    /// A vector, which is read in full.
    pub fn vector(self, name: &str) -> Self {
        let bytes = self.elements(name) * F32;
        self.moved(Contents::Vector(name.to_owned()), bytes, Access::Read, bytes)
    }

    /// Codes, scales and biases of a matrix that is read in full and multiplied with so many rows.
    pub fn matrix(self, name: &str, rows: usize) -> Self {
        self.rows_of(name, 1, 1, rows)
    }

    /// Those of all routed experts' matrices, of which at most those that `tokens` tokens choose are read, and multiplied with so many
    /// rows in all.
    pub fn experts(self, name: &str, tokens: usize, rows: usize) -> Self {
        let m = &self.builder.config.moe;
        let (read, of) = ((tokens * m.experts_per_token).min(m.experts), m.experts);
        self.rows_of(name, read, of, rows)
    }

    /// What there is of codes, scales and biases of a matrix of which `read` in `of` parts are read, and one is multiplied with each of
    /// so many rows.
    pub fn rows_of(self, name: &str, read: usize, of: usize, rows: usize) -> Self {
        let (elements, bits) = (self.elements(name), self.builder.bits(name));
        let part = |bytes: usize| bytes / of * read;
        let (codes, name) = (elements * bits / 8, name.to_owned());
        let codes = self.moved(Contents::Codes(name.clone()), codes, Access::Read, part(codes));
        let codes = codes.times(elements / of * rows);
        if bits == 16 {
            let absent = |what| Contents::Absent(format!("{what} of {name}"));
            let scales = codes.small(absent("scales"), F32, Access::Read);
            return scales.small(absent("biases"), F32, Access::Read);
        }
        let bytes = elements / GROUP * 2;
        let scales = codes.moved(Contents::Scales(name.clone()), bytes, Access::Read, part(bytes));
        scales.moved(Contents::Biases(name), bytes, Access::Read, part(bytes))
    }
}
