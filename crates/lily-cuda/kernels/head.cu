// Behind the last layer: rows that logits are wanted for, faults, and the draw of a token. The draw is that of
// lily-model's sample.rs, which says what each step means.

#define DRAW_THREADS 1024

// The residual rows that logits are wanted for, one behind the other. Grid: rows of the step.
extern "C" __global__ void __launch_bounds__(THREADS) gather(const Row* rows, const float* x, float* wanted) {
    launch_dependents();
    wait_for_inputs();
    const u32 to = rows[blockIdx.x].logits;
    if (to == NONE) return;
    for (u32 i = threadIdx.x; i < HIDDEN; i += THREADS) wanted[(u64)to * HIDDEN + i] = __ldcg(x + (u64)blockIdx.x * HIDDEN + i);
}

// How a token is drawn; see src/sample.rs.
struct Draw {
    float temperature, top_p, min_p, repetition, presence, frequency;
    u32 top_k, generated_from;
    u32 seed_low, seed_high;
    u32 bias_first, bias_count;  // in `biases`
    u32 mask_first;              // in `masks`, or NONE
    u32 plain;                   // 1: greedy, and nothing changes the logits
    u32 unused[2];
};
struct Bias {
    u32 token;
    float value;
};
// What the host learns of a segment.
struct Result {
    u32 token;
    u32 broken;  // first position that is not finite, or NONE
};

__device__ void philox(u32 (&c)[4], u32 k0, u32 k1) {
#pragma unroll
    for (int i = 0; i < 10; i++) {
        const u64 a = (u64)c[0] * 0xD2511F53u, b = (u64)c[2] * 0xCD9E8D57u;
        const u32 n0 = (u32)(b >> 32) ^ c[1] ^ k0, n2 = (u32)(a >> 32) ^ c[3] ^ k1;
        c[0] = n0;
        c[1] = (u32)b;
        c[2] = n2;
        c[3] = (u32)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

__device__ double gumbel(u32 seed_low, u32 seed_high, u64 position, u32 token) {
    u32 c[4] = {token / 4, 0, (u32)position, (u32)(position >> 32)};
    philox(c, seed_low, seed_high);
    const u32 word = token % 4 == 0 ? c[0] : token % 4 == 1 ? c[1] : token % 4 == 2 ? c[2] : c[3];
    return -log(-log(((double)word + 0.5) / 4294967296.0));
}

// The largest value of a block and the smallest token that has it.
__device__ void block_best(double value, u32 token, double& best, u32& winner) {
    __shared__ double values[32];
    __shared__ u32 tokens[32];
    for (int o = 16; o; o >>= 1) {
        const double v = __shfl_xor_sync(FULL, value, o);
        const u32 t = __shfl_xor_sync(FULL, token, o);
        if (v > value || (v == value && t < token)) {
            value = v;
            token = t;
        }
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        values[threadIdx.x / 32] = value;
        tokens[threadIdx.x / 32] = token;
    }
    __syncthreads();
    best = values[0];
    winner = tokens[0];
    for (u32 i = 1; i < blockDim.x / 32; i++)
        if (values[i] > best || (values[i] == best && tokens[i] < winner)) {
            best = values[i];
            winner = tokens[i];
        }
}

__device__ u32 block_min(u32 x) {
    __shared__ u32 least;
    __syncthreads();
    if (threadIdx.x == 0) least = NONE;
    __syncthreads();
    x = __reduce_min_sync(FULL, x);
    if (threadIdx.x % 32 == 0 && x != NONE) atomicMin(&least, x);
    __syncthreads();
    return least;
}

// First row of x, [rows, width], that holds a value which is not finite, or NONE.
__device__ u32 first_broken(const float* x, u32 rows, u32 width) {
    // Rows that are not a multiple of four long don't all begin at 16 bytes.
    const u64 n = (u64)rows * width, vectors = width % 4 == 0 ? n : 0;
    u64 at = ~0ull;
#pragma unroll 4
    for (u64 i = threadIdx.x * 4; i < vectors; i += DRAW_THREADS * 4) {
        const float4 v = __ldcg((const float4*)(x + i));
        // Zero times what is not finite is NaN, which is not equal to anything.
        if ((v.x * 0.0f + v.y * 0.0f) + (v.z * 0.0f + v.w * 0.0f) != 0.0f) at = min(at, i);
    }
    for (u64 i = vectors + threadIdx.x; i < n; i += DRAW_THREADS)
        if (!isfinite(__ldcg(x + i))) at = min(at, i);
    return block_min(at == ~0ull ? NONE : (u32)(at / width));
}

// The largest of a row's logits [begin, end), the smallest token that has it, and whether one is not finite. `begin` is a multiple
// of four.
__device__ Best greatest(const float* x, u32 begin, u32 end) {
    float value = -INFINITY;
    u32 token = NONE;
    bool broken = false;
    auto see = [&](float v, u32 i) {
        if (v > value) {
            value = v;
            token = i;
        }
    };
    const u32 vectors = VOCAB % 4 == 0 ? end / 4 * 4 : begin;
#pragma unroll 4
    for (u32 i = begin + threadIdx.x * 4; i < vectors; i += DRAW_THREADS * 4) {
        const float4 v = __ldcg((const float4*)(x + i));
        // Zero times what is not finite is NaN, which is not equal to anything.
        broken |= (v.x * 0.0f + v.y * 0.0f) + (v.z * 0.0f + v.w * 0.0f) != 0.0f;
        see(v.x, i);
        see(v.y, i + 1);
        see(v.z, i + 2);
        see(v.w, i + 3);
    }
    for (u32 i = vectors + threadIdx.x; i < end; i += DRAW_THREADS) {
        const float v = __ldcg(x + i);
        broken |= !isfinite(v);
        see(v, i);
    }
    double best;
    u32 winner;
    block_best(value, token, best, winner);
    return Best{(float)best, winner, (u32)__syncthreads_or(broken), 0};
}

// The same of parts of the logits of every row that has some. Grid: (parts, rows of the step); best: [rows, parts].
extern "C" __global__ void __launch_bounds__(DRAW_THREADS) bests(const Row* rows, const float* logits, Best* best) {
    launch_dependents();
    wait_for_inputs();
    const u32 per = ((VOCAB + 3) / 4 + gridDim.x - 1) / gridDim.x * 4, begin = min((u32)VOCAB, blockIdx.x * per);
    const Best b = greatest(logits + (u64)rows[blockIdx.y].logits * VOCAB, begin, min((u32)VOCAB, begin + per));
    if (threadIdx.x == 0) best[blockIdx.y * gridDim.x + blockIdx.x] = b;
}

// Logits as bias, penalties, mask and temperature leave them. `seen`: a word per token of scratch.
__device__ void adjust(const Draw& d, const float* logits, const u32* history, u32 length, const Bias* biases, const u32* masks,
                       u32* seen, float* out) {
    const bool penalties = d.repetition != 1.0f || d.presence != 0.0f || d.frequency != 0.0f;
    for (u32 i = threadIdx.x; i < VOCAB; i += DRAW_THREADS) {
        out[i] = __ldcg(logits + i);
        if (penalties) seen[i] = 0;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < d.bias_count; i += DRAW_THREADS) {
        const Bias b = biases[d.bias_first + i];
        if (b.token < VOCAB) atomicAdd(out + b.token, b.value);
    }
    if (penalties)
        for (u32 i = threadIdx.x; i < length; i += DRAW_THREADS) {
            const u32 token = __ldcg(history + i);
            atomicOr(seen + token, 0x80000000u);
            if (i >= d.generated_from) atomicAdd(seen + token, 1);
        }
    __syncthreads();
    for (u32 i = threadIdx.x; i < VOCAB; i += DRAW_THREADS) {
        float x = out[i];
        if (penalties && seen[i]) {
            const u32 count = seen[i] & 0x7fffffffu;
            if (d.repetition != 1.0f) x = x > 0.0f ? x / d.repetition : x * d.repetition;
            if (count) x -= d.presence + d.frequency * (float)count;
        }
        if (d.mask_first != NONE && !(__ldg(masks + d.mask_first + i / 32) >> (i % 32) & 1)) x = -INFINITY;
        out[i] = d.temperature > 0.0f ? x / d.temperature : x;
    }
    __syncthreads();
}

// Which tokens are kept: those above a value, and of those that equal it the first few.
struct Cut {
    u32 key;
    u32 equals;
};

// The cut behind which `wanted` is reached, going down from the largest: tokens (mass: false) or their mass exp(x - max)
// (true). Nothing below `before` counts. Radix selection, eight bits of the key at a time.
template <bool MASS> __device__ Cut select(const float* x, double wanted, float max, Cut before) {
    __shared__ double bins[256];
    __shared__ u32 prefix_shared, equals_shared;
    __shared__ double wanted_shared;
    u32 prefix = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < 256; i += DRAW_THREADS) bins[i] = 0;
        __syncthreads();
        for (u32 i = threadIdx.x; i < VOCAB; i += DRAW_THREADS) {
            const float v = x[i];
            const u32 key = order_key(v);
            if (v > -INFINITY && key > before.key && (key & mask) == prefix)
                atomicAdd(&bins[key >> shift & 255], MASS ? exp((double)(v - max)) : 1.0);
        }
        // Of those that equal the earlier cut only the kept ones count.
        if (threadIdx.x == 0 && before.equals && (before.key & mask) == prefix) {
            const float v = __uint_as_float(before.key & 0x80000000u ? before.key & 0x7fffffffu : ~before.key);
            atomicAdd(&bins[before.key >> shift & 255], before.equals * (MASS ? exp((double)(v - max)) : 1.0));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int bin = 255;
            double left = wanted;
            int lowest = 256;
            for (; bin >= 0; bin--) {
                if (bins[bin] > 0) lowest = bin;
                if (bins[bin] > 0 && bins[bin] >= left) break;
                left -= bins[bin];
            }
            // Rounding may leave a little wanted behind the last one: it is the cut then.
            if (bin < 0) {
                bin = lowest & 255;
                left = bins[bin];
            }
            prefix_shared = prefix | (u32)bin << shift;
            wanted_shared = left;
            const u32 key = prefix_shared;
            const float v = __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
            equals_shared = (u32)fmax(1.0, ceil(left / (MASS ? exp((double)(v - max)) : 1.0)));
        }
        __syncthreads();
        prefix = prefix_shared;
        wanted = wanted_shared;
        mask |= 255u << shift;
    }
    return Cut{prefix, equals_shared};
}

// Draws from adjusted logits over the temperature.
__device__ u32 draw(const Draw& d, const float* x, u64 position) {
    __shared__ u32 warp_counts[32];
    __shared__ u32 equal_total;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    double value = -INFINITY, best;
    u32 token = NONE, winner;
    u32 allowed = 0;
    for (u32 i = threadIdx.x; i < VOCAB; i += DRAW_THREADS) {
        if (x[i] > value) {
            value = x[i];
            token = i;
        }
        allowed += x[i] > -INFINITY;
    }
    block_best(value, token, best, winner);
    if (d.temperature <= 0.0f) return winner;
    const float max = (float)best;
    __shared__ u32 allowed_shared;
    if (threadIdx.x == 0) allowed_shared = equal_total = 0;
    __syncthreads();
    allowed = __reduce_add_sync(FULL, allowed);
    if (lane == 0) atomicAdd(&allowed_shared, allowed);
    __syncthreads();
    Cut cut = {0, 0};  // no finite number has key 0
    if (d.top_k > 0 && d.top_k < allowed_shared) cut = select<false>(x, d.top_k, max, cut);
    if (d.top_p < 1.0f) {
        double mass = 0;
        for (u32 i = threadIdx.x; i < VOCAB; i += DRAW_THREADS)
            if (x[i] > -INFINITY && order_key(x[i]) > cut.key) mass += exp((double)(x[i] - max));
        __shared__ double total;
        __syncthreads();
        if (threadIdx.x == 0) {
            const float v = __uint_as_float(cut.key & 0x80000000u ? cut.key & 0x7fffffffu : ~cut.key);
            total = cut.equals ? cut.equals * exp((double)(v - max)) : 0.0;
        }
        __syncthreads();
        for (int o = 16; o; o >>= 1) mass += __shfl_xor_sync(FULL, mass, o);
        if (lane == 0) atomicAdd(&total, mass);
        __syncthreads();
        cut = select<true>(x, (double)d.top_p * total, max, cut);
    }
    // How many equal the cut decides whether their order matters.
    u32 equal = 0;
    for (u32 i = threadIdx.x; i < VOCAB; i += DRAW_THREADS) equal += order_key(x[i]) == cut.key;
    equal = __reduce_add_sync(FULL, equal);
    if (lane == 0 && equal) atomicAdd(&equal_total, equal);
    __syncthreads();
    const bool ordered = equal_total > cut.equals && cut.key != 0;
    const float least = d.min_p > 0.0f ? max + logf(d.min_p) : -INFINITY;
    value = -INFINITY;
    token = NONE;
    u32 before = 0;
    for (u32 base = 0; base < VOCAB; base += DRAW_THREADS) {
        const u32 i = base + threadIdx.x;
        const float v = i < VOCAB ? x[i] : -INFINITY;
        const u32 key = order_key(v);
        bool kept = v > -INFINITY && v >= least && key >= cut.key;
        if (ordered) {
            const u32 votes = __ballot_sync(FULL, key == cut.key);
            __syncthreads();
            if (lane == 0) warp_counts[warp] = __popc(votes);
            __syncthreads();
            u32 rank = before + __popc(votes & ((1u << lane) - 1));
            for (u32 w = 0; w < 32; w++) {
                if (w < warp) rank += warp_counts[w];
                before += warp_counts[w];
            }
            if (key == cut.key && rank >= cut.equals) kept = false;
        }
        if (!kept) continue;
        const double noisy = (double)v + gumbel(d.seed_low, d.seed_high, position, i);
        if (noisy > value || token == NONE) {
            value = noisy;
            token = i;
        }
    }
    block_best(value, token, best, winner);
    return winner;
}

// One block a segment: looks for faults, draws, and leaves the token for the next step and for the host. `best`: the largest
// logit of each of `parts` of a segment's row, if `parts` > 0.
extern "C" __global__ void __launch_bounds__(DRAW_THREADS)
finish(const Segment* segments, const Row* rows, const float* x, const float* logits, const Best* best, u32 parts, const Draw* draws,
       const Bias* biases, const u32* masks, const u32* history, u64 history_stride, u32* seen, float* adjusted, u32* sampled,
       Result* results) {
    launch_dependents();
    wait_for_inputs();
    const Segment s = segments[blockIdx.x];
    best += blockIdx.x * parts;
    u32 broken = first_broken(x + (u64)s.first * HIDDEN, s.rows, HIDDEN);
    if (broken != NONE) broken += s.start;
    const float* mine = nullptr;
    if (s.want) {
        const u32 last = s.first + s.rows - 1;
        mine = logits + (u64)rows[last].logits * VOCAB;
        if (broken == NONE) {
            u32 at = NONE;
            if (parts) {
                for (u32 i = threadIdx.x; i < parts; i += DRAW_THREADS)
                    if (__ldcg(&best[i].broken)) at = 0;
                at = block_min(at);
            } else {
                at = first_broken(mine - (u64)(s.want - 1) * VOCAB, s.want, VOCAB);
            }
            if (at != NONE) broken = s.start + s.rows - s.want + at;
        }
    }
    u32 token = NONE;
    if (s.sample && broken == NONE) {
        const Draw d = draws[blockIdx.x];
        const u32 length = s.start + s.rows;
        if (d.plain && parts) {
            double value = -INFINITY, top;
            for (u32 i = threadIdx.x; i < parts; i += DRAW_THREADS) {
                const float v = __ldcg(&best[i].value);
                const u32 row = __ldcg(&best[i].row);
                if (v > value || (v == value && row < token)) {
                    value = v;
                    token = row;
                }
            }
            block_best(value, token, top, token);
        } else if (d.plain) {
            token = greatest(mine, 0, VOCAB).row;
        } else {
            float* out = adjusted + (u64)blockIdx.x * VOCAB;
            adjust(d, mine, history + s.slot * history_stride, length, biases, masks, seen + (u64)blockIdx.x * VOCAB, out);
            token = draw(d, out, length);
        }
    }
    if (threadIdx.x == 0) {
        if (s.sample) sampled[s.slot] = broken == NONE ? token : 0;
        results[blockIdx.x] = Result{token, broken};
    }
}
