"""`python -m unittest` in this folder, with the packages of requirements.txt."""

import json
import tempfile
import unittest
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize

import gguf_model
import table

DEMO = json.loads((Path(__file__).parents[2] / "models/demo/config.json").read_text())
# As `lily inspect --preset demo` counts them.
LILY_PARAMETERS = 21_219_272


class Blocks(unittest.TestCase):
    def test_weights_have_the_deviation_that_was_asked_for(self):
        rng = np.random.Generator(np.random.SFC64(1))
        for kind, dtype in gguf_model.BLOCKS.items():
            block, size = gguf.GGML_QUANT_SIZES[kind]
            self.assertEqual(dtype.itemsize, size, kind.name)
            blocks = gguf_model.random_blocks(kind, 4000, 0.02, rng)
            weights = dequantize(blocks.view(np.uint8).reshape(4000, size), kind)
            self.assertEqual(weights.size, 4000 * block)
            self.assertAlmostEqual(weights.std() / 0.02, 1, delta=0.05, msg=kind.name)
            self.assertLess(abs(weights.mean()), 0.15 * 0.02, kind.name)


class Files(unittest.TestCase):
    def test_a_file_holds_the_planned_tensors_and_as_many_weights_as_lilys(self):
        for form, kinds in gguf_model.FORMS.items():
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "demo.gguf"
                gguf_model.write(DEMO, form, path)
                reader = gguf.GGUFReader(path)
                found = {t.name: t for t in reader.tensors}
                self.assertEqual(reader.fields["general.architecture"].contents(), "qwen35moe")
                self.assertEqual(sum(int(t.n_elements) for t in reader.tensors), LILY_PARAMETERS)
                self.assertEqual(found["output.weight"].tensor_type, kinds[1])
                self.assertEqual(list(found["blk.0.ffn_down_exps.weight"].shape), [64, 256, 16])
                self.assertEqual(found["blk.0.ffn_gate_inp.weight"].tensor_type, gguf.GGMLQuantizationType.F32)
                self.assertNotIn("blk.3.ssm_a", found)
                self.assertEqual([p.name for p in Path(folder).iterdir()], ["demo.gguf"])

    def test_layers_in_another_order_than_llama_cpp_expects_are_refused(self):
        config = json.loads(json.dumps(DEMO))
        config["text_config"]["layer_types"][0] = "full_attention"
        with tempfile.TemporaryDirectory() as folder, self.assertRaisesRegex(ValueError, "layer 0 is full_attention"):
            gguf_model.write(config, "q4_0", Path(folder) / "x.gguf")


class Table(unittest.TestCase):
    def test_ratios_are_medians_over_the_better_peer_and_its_better_variant(self):
        def sample(program, speed, variant=""):
            return {"size": "demo", "threads": 2, "test": "tg64", "program": program, "tokens_per_s": speed, "variant": variant}
        samples = [sample("Lily", x) for x in (100, 240, 300)]
        samples += [sample("llama.cpp Q4_0", x, "on") for x in (90, 100, 900)]
        samples += [sample("llama.cpp Q4_0", x, "off") for x in (110, 120, 130)]
        samples += [sample("llama.cpp Q4_K", 80)]
        text = table.markdown({"heading": "H", "notes": ["N"], "samples": samples})
        self.assertIn("| demo | 2 | tg64 | 240 (100–300) | – | 120 (110–130) | 80 | – | **2.00** | – |", text)
        self.assertTrue(text.startswith("H\n") and text.endswith("* N\n"))

    def test_small_numbers_keep_three_digits(self):
        self.assertEqual([table.number(x) for x in (0.51234, 9.876, 99.94, 1234.5)], ["0.512", "9.88", "99.9", "1,234"])


if __name__ == "__main__":
    unittest.main()
