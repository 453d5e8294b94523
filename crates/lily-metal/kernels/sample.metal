// How a token is drawn: lily-model's `sample.rs` says what each step means. Metal has no f64, and in f32 a draw would differ from the
// CPU's once in about a million tokens. So logarithms and exponentials are integers, right to 40 bits or more, and so are sums, whose
// order does not matter then.

/// What the host says of a draw: `src/draw.rs` has the same words.
struct Draw {
    /// What logits are divided by.
    float temperature;
    float repetition;
    /// What is taken from the owed token if it was not generated before.
    float owed_penalty;
    /// The logarithm of min-p.
    float least;
    uint kind;
    /// 0: all.
    uint top_k;
    /// Top-p in units of 2^-64; 0: all.
    uint top_p_low, top_p_high;
    uint seed_low, seed_high;
    /// Tokens of the sequence.
    uint position;
    /// How many changes there are.
    uint changes;
    /// Whether the step's only token is one that the changes don't know of.
    uint owed;
    /// Whether there is a mask: a bit per token, lowest first, 0 forbids it.
    uint masked;
    /// By how much the values of tokens that top-p can't keep lie below the largest one, or more.
    float beyond;
};

/// The largest value.
constant constexpr uint DRAW_LARGEST = 0;
/// The largest value with its noise.
constant constexpr uint DRAW_ANY = 1;
/// The same, of those tokens that top-k, top-p and min-p keep.
constant constexpr uint DRAW_KEPT = 2;

/// What a request does to the logit of a token. They are in the order of tokens, each at most once.
struct Change {
    /// Twice the token, and 1 if the token is in the sequence.
    uint key;
    float bias;
    /// What is taken for how often it was generated, and what if it is owed once more.
    float penalty, owed_penalty;
};

/// A token and its value, which is the sum of two numbers. NaN stands for any logit that is not finite.
struct Best {
    float value;
    float rest;
    uint token;
};

/// Whether `a` comes before `b`: what is not finite first, then the larger value, of equal ones the smaller token.
inline bool before(Best a, Best b) {
    if (isnan(a.value) || isnan(b.value)) {
        return isnan(a.value) && (!isnan(b.value) || a.token < b.token);
    }
    if (a.value != b.value) {
        return a.value > b.value;
    }
    return a.rest > b.rest || (a.rest == b.rest && a.token < b.token);
}

/// The first of all lanes', on every lane.
inline Best first_of_lanes(Best mine) {
    for (ushort step = LANES / 2; step > 0; step /= 2) {
        const Best other = {
            simd_shuffle_xor(mine.value, step), simd_shuffle_xor(mine.rest, step), simd_shuffle_xor(mine.token, step)
        };
        if (before(other, mine)) {
            mine = other;
        }
    }
    return mine;
}

/// ln 2 in units of 2^-64.
constant constexpr ulong LN_2 = 0xb17217f7d1cf79abul;
/// ln(1 + 2^-k) in units of 2^-64, k from 1.
constant constexpr uint LOGARITHMS = 24;
constant ulong logarithms[LOGARITHMS] = {
    0x67cc8fb2fe612fcaul, 0x391fef8f35344358ul, 0x1e27076e2af2e5e9ul, 0x0f85186008b15330ul,
    0x07e0a6c39e0cc013ul, 0x03f815161f807c79ul, 0x01fe02a6b106788ful, 0x00ff805515885e02ul,
    0x007fe00aa6ac4399ul, 0x003ff8015515621ful, 0x001ffe002aa6ab11ul, 0x000fff8005551558ul,
    0x0007ffe000aaa6aaul, 0x0003fff800155515ul, 0x0001fffe0002aaa6ul, 0x0000ffff80005555ul,
    0x00007fffe0000aaaul, 0x00003ffff8000155ul, 0x00001ffffe00002aul, 0x00000fffff800005ul,
    0x000007ffffe00000ul, 0x000003fffff80000ul, 0x000001fffffe0000ul, 0x000000ffffff8000ul
};

/// -ln(1 - d) for d up to 1/2, both in units of 2^-64: 1 - d is brought up to 1 by factors 1 + 2^-k, whose logarithms are known.
inline ulong minus_log(ulong d) {
    ulong sum = 0;
    for (uint k = 1; k <= LOGARITHMS; ++k) {
        const ulong raised = d + (d >> k);
        const ulong step = 1ul << (64 - k);
        if (raised >= step) {
            d = raised - step;
            sum += logarithms[k - 1];
        }
    }
    // What is left is below 2^-24: two terms of the series.
    return sum + d + ((d >> 20) * (d >> 20) >> 25);
}

/// Gumbel noise of a token, -ln(-ln u), and 6 ln 2, lest it be negative; in units of 2^-58. u is a random number of 32 bits, plus
/// one half, by Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
inline ulong noise(const device Draw* d, uint token) {
    uint counter[4] = {token / 4, 0, d->position, 0};
    uint keys[2] = {d->seed_low, d->seed_high};
    for (uint round = 0; round < 10; ++round) {
        const ulong a = ulong(counter[0]) * 0xd2511f53u;
        const ulong b = ulong(counter[2]) * 0xcd9e8d57u;
        counter[0] = uint(b >> 32) ^ counter[1] ^ keys[0];
        counter[1] = uint(b);
        counter[2] = uint(a >> 32) ^ counter[3] ^ keys[1];
        counter[3] = uint(a);
        keys[0] += 0x9e3779b9u;
        keys[1] += 0xbb67ae85u;
    }
    const uint lower = token % 2 == 0 ? counter[0] : counter[1];
    const uint upper = token % 2 == 0 ? counter[2] : counter[3];
    const uint word = token % 4 < 2 ? lower : upper;
    // u = x / 2^zeros with x from 1/2 to 1.
    const uint zeros = clz(word);
    const ulong x = (2 * ulong(word) + 1) << (31 + zeros);
    ulong e = minus_log(0 - x);
    uint unit = 0;
    if (zeros > 0) {
        e = (e >> 6) + zeros * (LN_2 >> 6);
        unit = 6;
    }
    // -ln u = y / 2^shift in units of 2^(unit - 64), with y from 1/2 to 1.
    const uint high = uint(e >> 32);
    const uint shift = high != 0 ? clz(high) : 32 + clz(uint(e));
    return (shift + 6 - unit) * (LN_2 >> 6) + (minus_log(0 - (e << shift)) >> 6);
}

/// A value and its noise. The sum of two f32 is exact if what rounding takes is kept. Beside values of 2^58 and more f64 loses the noise.
inline Best noisy(float value, const device Draw* d, uint token) {
    const ulong g = noise(d, token);
    const float upper = float(uint(g >> 39)) * (1.0f / 524288.0f);
    const float lower = float(uint(g >> 15) & 0xffffff) * (1.0f / 8796093022208.0f);
    const float sum = value + upper;
    if (!(abs(sum) < 288230376151711744.0f)) {
        return {value, 0.0f, token};
    }
    const float added = sum - value;
    const float rest = (value - (sum - added)) + (upper - added) + lower;
    const float all = sum + rest;
    return {all, rest - (all - sum), token};
}

/// e^-z for z >= 0, in units of 2^-44: powers of 2, and factors 1 + 2^-k for what is left.
inline ulong exp_minus(float z) {
    if (z > 30.5f) {
        return 0;
    }
    if (z == 0.0f) {
        return 1ul << 44;
    }
    // In units of 2^-58, which the multiplication makes without rounding.
    const ulong exponent = ulong(z * 288230376151711744.0f);
    const ulong ln_2 = LN_2 >> 6;
    uint halvings = uint(z * 1.44269504f);
    // It may be rounded to one too many or too few.
    if (halvings * ln_2 > exponent) {
        halvings -= 1;
    }
    if ((halvings + 1) * ln_2 <= exponent) {
        halvings += 1;
    }
    ulong left = (halvings + 1) * ln_2 - exponent;
    ulong power = 1ul << 62;
    for (uint k = 1; k <= LOGARITHMS; ++k) {
        if (left >= logarithms[k - 1] >> 6) {
            left -= logarithms[k - 1] >> 6;
            power += power >> k;
        }
    }
    power += (power >> 32) * (left >> 4) >> 22;
    return power >> (19 + halvings);
}

/// A logit as bias, penalties, mask and temperature leave it.
inline float adjusted_logit(
    float x, uint token, const device Draw* d, const device Change* changes, const device uint* mask, const device uint* tokens
) {
    uint at = 0;
    for (uint end = d->changes; at < end;) {
        const uint middle = (at + end) / 2;
        if (changes[middle].key < 2 * token) {
            at = middle + 1;
        } else {
            end = middle;
        }
    }
    const bool owed = d->owed != 0 && tokens[0] == token;
    bool seen = owed;
    float penalty = owed ? d->owed_penalty : 0.0f;
    if (at < d->changes && changes[at].key / 2 == token) {
        x += changes[at].bias;
        seen = seen || changes[at].key % 2 == 1;
        penalty = owed ? changes[at].owed_penalty : changes[at].penalty;
    }
    if (seen) {
        // A plain product might be rounded together with the difference behind it.
        x = x > 0.0f ? x / d->repetition : fma(x, d->repetition, 0.0f);
    }
    x -= penalty;
    if (d->masked != 0 && (mask[token / 32] >> (token % 32) & 1) == 0) {
        return -INFINITY;
    }
    return x / d->temperature;
}

/// What a logit means for the draw; `adjusted` keeps it where the draw needs more than the first of each group.
inline Best candidate(
    float logit, uint token, const device Draw* d, const device Change* changes, const device uint* mask, const device uint* tokens,
    device float* adjusted
) {
    if (!isfinite(logit)) {
        return {NAN, 0.0f, token};
    }
    const float value = adjusted_logit(logit, token, d, changes, mask, tokens);
    if (d->kind == DRAW_KEPT) {
        adjusted[token] = value;
    }
    if (d->kind == DRAW_ANY && value > -INFINITY) {
        return noisy(value, d, token);
    }
    return {value, 0.0f, token};
}

/// Tokens of a group, of which the first is known: those that a SIMD-group has one each of.
constant constexpr uint DRAW_GROUP = LANES;
constant constexpr uint DRAW_GROUPS = (VOCAB + DRAW_GROUP - 1) / DRAW_GROUP;
constant constexpr uint DRAW_THREADS = 1024;

/// Behind all tokens.
constant constexpr uint NO_TOKEN = 0xffffff;

/// The place of a token among all: larger values have larger ones, and of equal values smaller tokens. 56 bits.
inline ulong rank(float value, uint token) {
    const uint bits = as_type<uint>(value);
    const uint key = bits >> 31 == 1 ? ~bits : bits | 0x80000000u;
    return (ulong(key) << 24) + (NO_TOKEN - token);
}

/// The lowest rank of a value that is finite.
constant constexpr ulong LOWEST_RANK = 0x00800000ul << 24;

/// Adds to one of several sums of 64 bits.
inline void add(threadgroup atomic_uint* sums, uint which, ulong value) {
    const uint low = uint(value);
    const uint before = atomic_fetch_add_explicit(sums + 2 * which, low, memory_order_relaxed);
    const uint high = uint(value >> 32) + (before > 0xffffffffu - low ? 1 : 0);
    if (high != 0) {
        atomic_fetch_add_explicit(sums + 2 * which + 1, high, memory_order_relaxed);
    }
}

inline ulong sum_of(const threadgroup atomic_uint* sums, uint which) {
    const ulong high = atomic_load_explicit(sums + 2 * which + 1, memory_order_relaxed);
    return (high << 32) + atomic_load_explicit(sums + 2 * which, memory_order_relaxed);
}

/// a b / 2^64, rounded up.
inline ulong product_above(ulong a, ulong b) {
    const ulong low = (a & 0xffffffff) * (b & 0xffffffff);
    const ulong middle = (a >> 32) * (b & 0xffffffff) + (low >> 32);
    const ulong other = (a & 0xffffffff) * (b >> 32) + (middle & 0xffffffff);
    return (a >> 32) * (b >> 32) + (middle >> 32) + (other >> 32) + (a * b != 0 ? 1 : 0);
}

/// What `finish` chooses from: the first token of each group, and the value of each token.
struct Choice {
    const device Best* groups;
    const device float* adjusted;
    /// The largest value.
    float top;
};

/// Whether a group has a token of rank `from` or above.
inline bool reaches(Choice c, uint group, ulong from) {
    return group < DRAW_GROUPS && rank(c.groups[group].value, c.groups[group].token) >= from;
}

/// The next of the groups that the lanes of a SIMD-group have, for all of them together; NONE: there are no more.
inline uint next_group(thread bool& mine, uint group) {
    const uint next = simd_min(mine ? group : NONE);
    mine = mine && group != next;
    return next;
}

/// The sum of e^(value - top) over the tokens from rank `from` on, in units of 2^-44.
inline ulong mass(Choice c, ulong from, threadgroup atomic_uint* sums, uint thread_index, uint lane) {
    if (thread_index < 2) {
        atomic_store_explicit(sums + thread_index, 0, memory_order_relaxed);
    }
    ulong all = 0;
    for (uint group = thread_index; group - lane < DRAW_GROUPS; group += DRAW_THREADS) {
        bool mine = reaches(c, group, from);
        for (uint next = next_group(mine, group); next != NONE; next = next_group(mine, group)) {
            const uint t = next * DRAW_GROUP + lane;
            if (t < VOCAB && rank(c.adjusted[t], t) >= from) {
                all += exp_minus(c.top - c.adjusted[t]);
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    add(sums, 0, all);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    all = sum_of(sums, 0);
    // Before others use the sums anew.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return all;
}

/// Of the tokens from rank `from` on, the rank of the last one that is kept. They count 1 each, with MASS e^(value - top), and are kept
/// until `wanted` is reached; if it never is, all. Without TOKENS the first of each group stands for it. Eight bits of the rank are
/// found at a time, from sums by their value.
template <bool TOKENS, bool MASS>
inline ulong select(
    Choice c, ulong from, ulong wanted, threadgroup atomic_uint* sums, threadgroup ulong* found, uint thread_index, uint lane
) {
    ulong prefix = 0;
    for (uint shift = 48;; shift -= 8) {
        for (uint i = thread_index; i < 512; i += DRAW_THREADS) {
            atomic_store_explicit(sums + i, 0, memory_order_relaxed);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint group = thread_index; group - lane < DRAW_GROUPS; group += DRAW_THREADS) {
            bool mine = reaches(c, group, from);
            if (!TOKENS && mine) {
                const ulong place = rank(c.groups[group].value, c.groups[group].token);
                if (place >> shift >> 8 == prefix >> shift >> 8) {
                    add(sums, uint(place >> shift) & 255, 1);
                }
            }
            mine = TOKENS && mine;
            for (uint next = next_group(mine, group); next != NONE; next = next_group(mine, group)) {
                const uint t = next * DRAW_GROUP + lane;
                const ulong place = t < VOCAB ? rank(c.adjusted[t], t) : 0;
                if (place >= from && place >> shift >> 8 == prefix >> shift >> 8) {
                    add(sums, uint(place >> shift) & 255, MASS ? exp_minus(c.top - c.adjusted[t]) : 1);
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (thread_index == 0) {
            ulong left = shift == 48 ? wanted : found[1];
            uint digit = 256;
            ulong sum = 0;
            do {
                left -= sum;
                digit -= 1;
                sum = sum_of(sums, digit);
            } while (sum < left && digit > 0);
            prefix |= ulong(digit) << shift;
            // All that begins so is kept, as far as there was any; or there are too few; or this is the rank itself.
            const bool last = sum <= left || shift == 0;
            found[0] = sum < left || (last && prefix < from) ? from : prefix;
            found[1] = left;
            found[2] = last ? 1 : 0;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        prefix = found[0];
        if (found[2] != 0) {
            return prefix;
        }
    }
}

/// The first of all threads', on every thread.
inline Best first_of_threads(
    Best mine, threadgroup float* values, threadgroup float* rests, threadgroup uint* tokens, uint simdgroup, uint lane
) {
    mine = first_of_lanes(mine);
    if (lane == 0) {
        values[simdgroup] = mine.value;
        rests[simdgroup] = mine.rest;
        tokens[simdgroup] = mine.token;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const Best all = {values[lane], rests[lane], tokens[lane]};
    return first_of_lanes(all);
}
