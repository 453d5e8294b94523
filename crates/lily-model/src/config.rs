//! `config.json`: every number the mathematics uses, read from the file and checked. Nothing has a default.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::fields::{Fields, invalid};

/// Shapes and constants of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Rows of the embedding and of lm_head, padding included.
    pub vocab_size: usize,
    /// Longest sequence the model was made for, tokens.
    pub max_context: usize,
    /// Added to the mean of squares in every RMS norm.
    pub rms_norm_eps: f32,
    /// The kind of each layer, first to last.
    pub layers: Vec<LayerKind>,
    /// Gated DeltaNet layers.
    pub gdn: GdnConfig,
    /// Gated attention layers.
    pub attention: AttentionConfig,
    /// The mixture of experts of every layer.
    pub moe: MoeConfig,
    /// lm_head is the embedding.
    pub tie_word_embeddings: bool,
    /// How matrices are quantised; `None`: they aren't.
    pub quantization: Option<Quantization>,
    /// Tokens that end a turn, if the file says so.
    pub eos_token_ids: Vec<u32>,
}

/// The mixer of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Gated DeltaNet (`linear_attention`).
    Gdn,
    /// Gated softmax attention (`full_attention`).
    Attention,
}

/// Shapes of a Gated DeltaNet layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GdnConfig {
    /// Query/key heads.
    pub key_heads: usize,
    /// Value heads; a multiple of `key_heads`.
    pub value_heads: usize,
    /// Width of a query or key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Taps of the causal convolution.
    pub conv_kernel: usize,
}

impl GdnConfig {
    /// Channels of the convolution: q, k and v of all heads.
    pub fn conv_channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_width()
    }
    /// All value heads side by side.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }
    /// f32 values of recurrent state per layer and sequence.
    pub fn state_len(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }
    /// f32 values of convolution state per layer and sequence: the last `conv_kernel - 1` inputs.
    pub fn conv_state_len(&self) -> usize {
        (self.conv_kernel - 1) * self.conv_channels()
    }
}

/// Shapes of a gated attention layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// The first so many dimensions of a head are rotated.
    pub rotary_dim: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
}

impl AttentionConfig {
    /// All query heads side by side.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }
    /// All key (or value) heads side by side.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// Shapes of a mixture of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoeConfig {
    /// Routed experts.
    pub experts: usize,
    /// Experts used per token.
    pub experts_per_token: usize,
    /// Width of a routed expert.
    pub expert_width: usize,
    /// Width of the shared expert.
    pub shared_width: usize,
}

/// Quantisation of the checkpoint: a default and exceptions by module path, as the file spells them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quantization {
    /// For every quantised module not named below.
    pub default: Affine,
    /// By exact module path; `None`: not quantised.
    pub overrides: BTreeMap<String, Option<Affine>>,
}

impl Quantization {
    /// The form of a module, by its path in the file (without `.weight`).
    pub fn of(&self, module: &str) -> Option<Affine> {
        self.overrides.get(module).copied().unwrap_or(Some(self.default))
    }
}

/// MLX affine quantisation: `value = scale * code + bias` with one scale and bias per group of inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Affine {
    /// Bits of a code: 4 or 8.
    pub bits: usize,
    /// Consecutive inputs that share a scale: 32, 64 or 128.
    pub group_size: usize,
}

/// What is wrong with a `config.json`.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON.
    #[error("not valid JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// A field that the mathematics needs is absent.
    #[error("`{0}` is missing; nothing is assumed in its place")]
    Missing(String),
    /// A field has a value that can't be used.
    #[error("`{field}` is {found}, expected {expected}")]
    Invalid {
        /// Path of the field.
        field: String,
        /// What would be right.
        expected: String,
        /// What is there.
        found: String,
    },
}

impl Config {
    /// Reads and checks the text of a `config.json`.
    pub fn from_json(text: &[u8]) -> Result<Self, ConfigError> {
        let root: Value = serde_json::from_slice(text)?;
        let top = Fields::of(&root, "")?;
        let text = text_fields(&top)?;
        Ok(Self {
            hidden_size: text.size("hidden_size")?,
            vocab_size: text.size("vocab_size")?,
            max_context: text.size("max_position_embeddings")?,
            rms_norm_eps: text.number("rms_norm_eps")? as f32,
            layers: layer_kinds(&text)?,
            gdn: gdn(&text)?,
            attention: attention(&text)?,
            moe: moe(&text)?,
            tie_word_embeddings: tied(&top, &text)?,
            quantization: quantization(&top)?,
            eos_token_ids: token_ids(&top, &text)?,
        })
    }

    /// Layers of a kind.
    pub fn count(&self, kind: LayerKind) -> usize {
        self.layers.iter().filter(|&&k| k == kind).count()
    }
}

/// The object that holds the text model's fields: `text_config`, or the file itself for a text-only one.
fn text_fields<'a>(top: &Fields<'a>) -> Result<Fields<'a>, ConfigError> {
    let value = top.need("model_type")?;
    let text = match value.as_str() {
        Some("qwen3_5_moe") => top.object("text_config")?,
        Some("qwen3_5_moe_text") => Fields { path: String::new(), map: top.map },
        _ => {
            return Err(invalid("model_type", "\"qwen3_5_moe\", the one architecture that Lily runs", value));
        }
    };
    text.only_if_present("model_type", "qwen3_5_moe_text".into())?;
    Ok(text)
}

fn layer_kinds(text: &Fields<'_>) -> Result<Vec<LayerKind>, ConfigError> {
    let n = text.size("num_hidden_layers")?;
    let value = text.need("layer_types")?;
    let list = value.as_array().ok_or_else(|| invalid(text.name("layer_types"), "a list", value))?;
    if list.len() != n {
        let field = text.name("layer_types");
        return Err(invalid(field, format!("{n} entries (num_hidden_layers)"), &list.len().into()));
    }
    let kind = |(i, v): (usize, &Value)| match v.as_str() {
        Some("linear_attention") => Ok(LayerKind::Gdn),
        Some("full_attention") => Ok(LayerKind::Attention),
        _ => Err(invalid(
            format!("{}[{i}]", text.name("layer_types")),
            "\"linear_attention\" or \"full_attention\"",
            v,
        )),
    };
    list.iter().enumerate().map(kind).collect()
}

fn gdn(text: &Fields<'_>) -> Result<GdnConfig, ConfigError> {
    let gdn = GdnConfig {
        key_heads: text.size("linear_num_key_heads")?,
        value_heads: text.size("linear_num_value_heads")?,
        key_dim: text.size("linear_key_head_dim")?,
        value_dim: text.size("linear_value_head_dim")?,
        conv_kernel: text.size("linear_conv_kernel_dim")?,
    };
    if !gdn.value_heads.is_multiple_of(gdn.key_heads) {
        let expected = format!("a multiple of linear_num_key_heads, {}", gdn.key_heads);
        return Err(invalid(text.name("linear_num_value_heads"), expected, &gdn.value_heads.into()));
    }
    if gdn.conv_kernel < 2 {
        return Err(invalid(text.name("linear_conv_kernel_dim"), "at least 2", &gdn.conv_kernel.into()));
    }
    Ok(gdn)
}

fn attention(text: &Fields<'_>) -> Result<AttentionConfig, ConfigError> {
    text.only("attn_output_gate", true.into())?;
    text.only("attention_bias", false.into())?;
    let rope = text.object("rope_parameters")?;
    let kind = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
    rope.only(kind, "default".into())?;
    let heads = text.size("num_attention_heads")?;
    let kv_heads = text.size("num_key_value_heads")?;
    if !heads.is_multiple_of(kv_heads) {
        let expected = format!("a multiple of num_key_value_heads, {kv_heads}");
        return Err(invalid(text.name("num_attention_heads"), expected, &heads.into()));
    }
    let head_dim = text.size("head_dim")?;
    let factor = partial_rotary_factor(text, &rope)?;
    let rotary = head_dim as f64 * factor;
    let rotary_dim = rotary as usize;
    if factor > 1.0 || rotary_dim < 2 || !rotary_dim.is_multiple_of(2) || rotary_dim as f64 != rotary {
        let expected = format!("a factor that takes an even number of the {head_dim} dimensions of a head");
        return Err(invalid("partial_rotary_factor", expected, &factor.into()));
    }
    Ok(AttentionConfig { heads, kv_heads, head_dim, rotary_dim, rope_theta: rope.number("rope_theta")? })
}

/// Stands in `rope_parameters`, in `text_config`, or in both.
fn partial_rotary_factor(text: &Fields<'_>, rope: &Fields<'_>) -> Result<f64, ConfigError> {
    const KEY: &str = "partial_rotary_factor";
    match (rope.get(KEY), text.get(KEY)) {
        (Some(a), Some(b)) if a != b => {
            Err(invalid(rope.name(KEY), format!("{b}, as {} says", text.name(KEY)), a))
        }
        (Some(_), _) => rope.number(KEY),
        (None, _) => text.number(KEY),
    }
}

fn moe(text: &Fields<'_>) -> Result<MoeConfig, ConfigError> {
    text.only("hidden_act", "silu".into())?;
    text.only_if_present("norm_topk_prob", true.into())?;
    let moe = MoeConfig {
        experts: text.size("num_experts")?,
        experts_per_token: text.size("num_experts_per_tok")?,
        expert_width: text.size("moe_intermediate_size")?,
        shared_width: text.size("shared_expert_intermediate_size")?,
    };
    if moe.experts_per_token > moe.experts {
        let expected = format!("at most num_experts, {}", moe.experts);
        return Err(invalid(text.name("num_experts_per_tok"), expected, &moe.experts_per_token.into()));
    }
    Ok(moe)
}

/// Stands at the top, in `text_config`, or in both.
fn tied(top: &Fields<'_>, text: &Fields<'_>) -> Result<bool, ConfigError> {
    const KEY: &str = "tie_word_embeddings";
    let tied = if text.get(KEY).is_some() { text.bool(KEY)? } else { top.bool(KEY)? };
    top.only_if_present(KEY, tied.into())?;
    Ok(tied)
}

fn token_ids(top: &Fields<'_>, text: &Fields<'_>) -> Result<Vec<u32>, ConfigError> {
    let fields = if top.get("eos_token_id").is_some() { top } else { text };
    fields.token_ids("eos_token_id")
}

fn quantization(top: &Fields<'_>) -> Result<Option<Quantization>, ConfigError> {
    let key = if top.get("quantization").is_some() { "quantization" } else { "quantization_config" };
    if top.get(key).is_none() {
        return Ok(None);
    }
    let fields = top.object(key)?;
    fields.only_if_present("mode", "affine".into())?;
    if let Some(method) = fields.get("quant_method") {
        return Err(invalid(fields.name("quant_method"), "MLX affine quantisation", method));
    }
    let mut overrides = BTreeMap::new();
    for (path, value) in fields.map {
        let form = match value {
            Value::Bool(false) => None,
            Value::Object(_) => Some(affine(&fields.object(path)?)?),
            _ => continue,
        };
        overrides.insert(path.clone(), form);
    }
    Ok(Some(Quantization { default: affine(&fields)?, overrides }))
}

fn affine(fields: &Fields<'_>) -> Result<Affine, ConfigError> {
    fields.only_if_present("mode", "affine".into())?;
    let form = Affine { bits: fields.size("bits")?, group_size: fields.size("group_size")? };
    if ![4, 8].contains(&form.bits) {
        return Err(invalid(fields.name("bits"), "4 or 8", &form.bits.into()));
    }
    if ![32, 64, 128].contains(&form.group_size) {
        return Err(invalid(fields.name("group_size"), "32, 64 or 128", &form.group_size.into()));
    }
    Ok(form)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REAL: &str = include_str!("../presets/35b-a3b/config.json");

    fn with(change: impl FnOnce(&mut Value)) -> Result<Config, ConfigError> {
        let mut root: Value = serde_json::from_str(REAL).unwrap();
        change(&mut root);
        Config::from_json(root.to_string().as_bytes())
    }

    #[test]
    fn the_published_config_is_read_in_full() {
        let c = with(|_| ()).unwrap();
        assert_eq!((c.hidden_size, c.vocab_size, c.max_context), (2048, 248_320, 262_144));
        assert_eq!((c.count(LayerKind::Gdn), c.count(LayerKind::Attention)), (30, 10));
        assert_eq!(c.layers[3], LayerKind::Attention);
        assert_eq!((c.gdn.conv_channels(), c.gdn.value_width(), c.gdn.state_len()), (8192, 4096, 524_288));
        assert_eq!((c.attention.rotary_dim, c.attention.rope_theta), (64, 1e7));
        assert_eq!((c.moe.experts, c.moe.experts_per_token), (256, 8));
        assert_eq!(c.eos_token_ids, [248_046, 248_044]);
        let q = c.quantization.unwrap();
        assert_eq!(q.default, Affine { bits: 4, group_size: 64 });
        assert_eq!(q.overrides.len(), 80);
        assert_eq!(q.of("language_model.model.layers.7.mlp.gate"), Some(Affine { bits: 8, group_size: 64 }));
        assert_eq!(q.of("language_model.lm_head"), Some(q.default));
    }

    /// Nothing that the mathematics uses may fall back on a default.
    #[test]
    fn every_field_is_needed() {
        let fields = [
            "hidden_size",
            "vocab_size",
            "max_position_embeddings",
            "rms_norm_eps",
            "num_hidden_layers",
            "layer_types",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
            "attn_output_gate",
            "attention_bias",
            "rope_parameters",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "hidden_act",
        ];
        for field in fields {
            let e = with(|c| _ = c["text_config"].as_object_mut().unwrap().remove(field)).unwrap_err();
            assert_eq!(
                e.to_string(),
                format!("`text_config.{field}` is missing; nothing is assumed in its place")
            );
        }
        let e =
            with(|c| _ = c["text_config"]["rope_parameters"].as_object_mut().unwrap().remove("rope_theta"));
        assert!(e.unwrap_err().to_string().contains("text_config.rope_parameters.rope_theta"));
        let e = with(|c| {
            c["text_config"].as_object_mut().unwrap().remove("partial_rotary_factor");
            c["text_config"]["rope_parameters"].as_object_mut().unwrap().remove("partial_rotary_factor");
        });
        assert!(e.unwrap_err().to_string().contains("partial_rotary_factor"));
    }

    #[test]
    fn other_forms_are_refused_by_name() {
        type Case = (fn(&mut Value), &'static str);
        let cases: [Case; 12] = [
            (|c| c["model_type"] = "llama".into(), "`model_type` is \"llama\""),
            (|c| c["text_config"]["hidden_act"] = "gelu".into(), "`text_config.hidden_act` is \"gelu\""),
            (|c| c["text_config"]["attn_output_gate"] = false.into(), "attn_output_gate"),
            (|c| c["text_config"]["norm_topk_prob"] = false.into(), "norm_topk_prob"),
            (|c| c["text_config"]["rope_parameters"]["rope_type"] = "yarn".into(), "\"yarn\""),
            (|c| c["text_config"]["layer_types"][5] = "sliding".into(), "layer_types[5]"),
            (|c| c["text_config"]["num_hidden_layers"] = 41.into(), "41 entries"),
            (|c| c["text_config"]["head_dim"] = 0.into(), "head_dim"),
            (|c| c["quantization"]["mode"] = "mxfp4".into(), "`quantization.mode` is \"mxfp4\""),
            (|c| c["quantization"]["bits"] = 3.into(), "`quantization.bits` is 3, expected 4 or 8"),
            (|c| c["quantization"]["group_size"] = 16.into(), "32, 64 or 128"),
            (|c| c["text_config"]["num_experts_per_tok"] = 300.into(), "at most num_experts, 256"),
        ];
        for (change, words) in cases {
            let e = with(change).unwrap_err().to_string();
            assert!(e.contains(words), "{e:?} should say {words:?}");
        }
        assert!(matches!(Config::from_json(b"{"), Err(ConfigError::Json(_))));
    }

    #[test]
    fn forms_of_other_writers_are_read() {
        let c = with(|c| {
            let rope = c["text_config"]["rope_parameters"].as_object_mut().unwrap();
            let kind = rope.remove("rope_type").unwrap();
            rope.insert("type".into(), kind);
            c["quantization"]["language_model.lm_head"] = false.into();
        })
        .unwrap();
        assert_eq!(c.quantization.unwrap().of("language_model.lm_head"), None);
        let mut text = serde_json::from_str::<Value>(REAL).unwrap()["text_config"].take();
        text["tie_word_embeddings"] = false.into();
        assert_eq!(Config::from_json(text.to_string().as_bytes()).unwrap().quantization, None);
    }
}
