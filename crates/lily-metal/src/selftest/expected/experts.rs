//! The same of the mixture of experts.

use lily_cpu::math::{sigmoid, silu, softmax, top_k};
use lily_cpu::reference::matvec;
use lily_model::weights::Expert;

use super::{Contents, Expected, Launched, add, bits, halves, product, scratch};

/// Pairs of token and slot in a tile.
const PAIR_ROWS: usize = 32;

impl Launched<'_> {
    /// The logits, and the shared expert's values, which have no weight yet.
    pub(super) fn router(&self) -> Option<Expected> {
        let moe = &self.of_layer()?.moe;
        let (k, width) = (self.config.moe.experts_per_token, self.middle_width());
        let rows = self.normed_input(self.middle_norm());
        let logits = |h: &Vec<f32>| [matvec(&moe.router, h), matvec(&moe.shared_gate, h)].concat();
        let logits = rows.iter().flat_map(logits).collect();
        let mut middle = self.scratch("middle").to_vec();
        for (h, slots) in rows.iter().zip(middle.chunks_exact_mut((k + 1) * width)) {
            swiglu(&moe.shared, h, 1.0, false, &mut slots[k * width..]);
        }
        Some(vec![scratch("router_logits", logits), scratch("middle", middle)])
    }

    /// Experts and their weights, by the router's logits of each row, and the one of the shared expert's gate.
    fn routes(&self) -> Vec<(Vec<usize>, Vec<f32>)> {
        let m = &self.config.moe;
        let route = |logits: &[f32], shared: f32| {
            // By the logits: two that differ may have equal probabilities.
            let mut chosen = vec![0; m.experts_per_token];
            top_k(logits, &mut chosen);
            let mut p = logits.to_vec();
            softmax(&mut p);
            let total: f32 = chosen.iter().map(|&e| p[e]).sum();
            let weights = chosen.iter().map(|&e| p[e] / total).chain([sigmoid(shared)]);
            let weights = weights.collect();
            (chosen, weights)
        };
        if self.before.contains_key(&Contents::Scratch("shared_logits")) {
            let rows = self.rows("router_logits", m.experts).zip(self.scratch("shared_logits"));
            return rows.map(|(logits, shared)| route(logits, *shared)).collect();
        }
        // Token by token they are beside each other.
        self.rows("router_logits", m.experts + 1)
            .map(|row| route(&row[..m.experts], row[m.experts]))
            .collect()
    }

    /// An expert by its number; behind the routed ones, the shared one.
    fn expert(&self, number: usize) -> Option<&Expert> {
        let moe = &self.of_layer()?.moe;
        Some(moe.experts.get(number).unwrap_or(&moe.shared))
    }

    /// Values between gate/up and down of one slot.
    fn middle_width(&self) -> usize {
        let m = &self.config.moe;
        m.expert_width.max(m.shared_width)
    }

    pub(super) fn gate_up(&self) -> Option<Expected> {
        let (k, width) = (self.config.moe.experts_per_token, self.middle_width());
        let (mut middle, mut all) = (self.scratch("middle").to_vec(), Vec::new());
        let rows = self.normed_input(self.middle_norm());
        let slots = middle.chunks_exact_mut((k + 1) * width);
        for ((h, slots), (chosen, weights)) in rows.iter().zip(slots).zip(self.routes()) {
            for ((&expert, weight), slot) in chosen.iter().zip(weights).zip(slots.chunks_exact_mut(width)) {
                swiglu(self.expert(expert)?, h, weight, false, slot);
            }
            all.extend(chosen.into_iter().map(bits));
        }
        Some(vec![scratch("middle", middle), scratch("chosen", all)])
    }

    pub(super) fn down(&self) -> Option<Expected> {
        let (m, width, k) = (&self.config.moe, self.middle_width(), self.config.moe.experts_per_token);
        let mut x = Vec::new();
        let middles = self.rows("middle", (k + 1) * width).zip(self.rows("chosen", k));
        let shares = self.rows("router_logits", m.experts + 1).map(|logits| sigmoid(logits[m.experts]));
        for ((row, (middles, chosen)), share) in self.x().zip(middles).zip(shares) {
            let chosen = chosen.iter().map(|e| (e.to_bits() as usize, 1.0));
            let mut row = row.to_vec();
            for ((expert, weight), middle) in
                chosen.chain([(m.experts, share)]).zip(middles.chunks_exact(width))
            {
                let down = &self.expert(expert)?.down;
                let y = matvec(down, &middle[..down.cols]).into_iter().map(|y| weight * y);
                row = add(&row, &y.collect::<Vec<_>>());
            }
            x.extend(row);
        }
        Some(vec![scratch("x", x)])
    }

    pub(super) fn route(&self) -> Option<Expected> {
        let experts = self.config.moe.experts;
        let (chosen, weights): (Vec<_>, Vec<_>) = self.routes().into_iter().unzip();
        let chosen = chosen.into_iter().flat_map(|c| c.into_iter().chain([experts])).map(bits).collect();
        Some(vec![scratch("chosen", chosen), scratch("shares", weights.concat())])
    }

    pub(super) fn sort_pairs(&self) -> Option<Expected> {
        let expert = |&pair: &usize| self.scratch("chosen")[pair].to_bits();
        let mut order: Vec<usize> = (0..self.scratch("chosen").len()).collect();
        order.sort_by_key(expert);
        let mut tiles = self.scratch("tiles").to_vec();
        let (places, _) = tiles.as_chunks_mut::<3>();
        places.iter_mut().for_each(|[expert, ..]| *expert = f32::from_bits(u32::MAX));
        let mut first = 0;
        for pairs in order.chunk_by(|a, b| expert(a) == expert(b)) {
            let number = expert(&pairs[0]);
            // Behind the most tiles that the experts before can have.
            let at = (first + (PAIR_ROWS - 1) * first.min(number as usize)) / PAIR_ROWS;
            for (tile, place) in pairs.chunks(PAIR_ROWS).zip(places.get_mut(at..)?) {
                *place = [f32::from_bits(number), bits(first), bits(tile.len())];
                first += tile.len();
            }
        }
        Some(vec![scratch("order", order.into_iter().map(bits).collect()), scratch("tiles", tiles)])
    }

    /// Each pair, by its tile: the pair and its expert; `None`: the tiles don't have all of them.
    fn pairs(&self) -> Option<Vec<(usize, usize)>> {
        let (mut out, order) = (Vec::new(), self.scratch("order"));
        for tile in self.scratch("tiles").as_chunks::<3>().0 {
            let [expert, first, count] = tile.map(|w| w.to_bits() as usize);
            if expert != u32::MAX as usize {
                let pairs = order.get(first..first.checked_add(count)?)?.iter().map(|p| p.to_bits() as usize);
                out.extend(pairs.map(|pair| (pair, expert)));
            }
        }
        (out.len() == order.len() && out.iter().all(|&(pair, _)| pair < order.len())).then_some(out)
    }

    /// The inputs of the pairs in their order.
    pub(super) fn gather_pairs(&self) -> Option<Expected> {
        let slots = self.config.moe.experts_per_token + 1;
        let h: Vec<&[f32]> = self.rows("h_half", self.config.hidden_size).collect();
        let rows = self.scratch("order").iter().map(|pair| h.get(pair.to_bits() as usize / slots).copied());
        Some(vec![halves("sorted_half", rows.collect::<Option<Vec<_>>>()?.concat())])
    }

    pub(super) fn gate_up_rows(&self, rounds: bool) -> Option<Expected> {
        let (width, slots) = (self.middle_width(), self.config.moe.experts_per_token + 1);
        let (h, name) = if rounds { ("sorted_half", "middle_half") } else { ("h", "middle") };
        let mut middle = self.scratch(name).to_vec();
        let h: Vec<&[f32]> = self.rows(h, self.config.hidden_size).collect();
        for (place, (pair, expert)) in self.pairs()?.into_iter().enumerate() {
            // With tensor operations in the order of the tiles.
            let (row, at) = if rounds { (place, place) } else { (pair / slots, pair) };
            let to = &mut middle[at * width..(at + 1) * width];
            swiglu(self.expert(expert)?, h[row], self.scratch("shares")[pair], rounds, to);
        }
        Some(vec![if rounds { halves(name, middle) } else { scratch(name, middle) }])
    }

    pub(super) fn down_rows(&self, rounds: bool) -> Option<Expected> {
        let (width, hidden) = (self.middle_width(), self.config.hidden_size);
        let mut spread = vec![0.0; self.scratch("spread").len()];
        let middle = self.scratch(if rounds { "middle_half" } else { "middle" });
        for (place, (pair, expert)) in self.pairs()?.into_iter().enumerate() {
            let down = &self.expert(expert)?.down;
            let at = if rounds { place } else { pair } * width;
            let y = product(down, &middle[at..][..down.cols], rounds);
            spread[pair * hidden..][..hidden].copy_from_slice(&y);
        }
        Some(vec![scratch("spread", spread)])
    }

    pub(super) fn sum_slots(&self) -> Expected {
        let (hidden, k) = (self.config.hidden_size, self.config.moe.experts_per_token);
        let rows = self.x().zip(self.rows("spread", (k + 1) * hidden));
        let sum =
            |(x, slots): (&[f32], &[f32])| slots.chunks_exact(hidden).fold(x.to_vec(), |x, y| add(&x, y));
        vec![scratch("x", rows.flat_map(sum).collect())]
    }
}

/// `weight * silu(gate h) * (up h)`, into the first values of `to`.
fn swiglu(expert: &Expert, h: &[f32], weight: f32, rounds: bool, to: &mut [f32]) {
    let pairs = product(&expert.gate, h, rounds).into_iter().zip(product(&expert.up, h, rounds));
    to.iter_mut().zip(pairs).for_each(|(to, (g, u))| *to = weight * silu(g) * u);
}
