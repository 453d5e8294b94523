// Random weights, in the packed form of a 4- or 8-bit checkpoint.

__device__ __forceinline__ u32 random_bits(u64 counter, u32 seed) {
    u64 x = (counter + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1342543DE82EF95ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return (u32)(x >> 32) ^ (u32)x;
}

// Codes at random; per row a scale of random sign that gives weights the deviation, and the bias that centres them.
extern "C" __global__ void __launch_bounds__(THREADS) random_tiles(u8* tiles, u64 n, u32 bytes, float deviation, u32 seed) {
    const u32 words = bytes / 4, codes = words - 16, steps = bytes == 576 ? 16 : 256;
    for (u64 tile = (u64)blockIdx.x * THREADS + threadIdx.x; tile < n; tile += (u64)gridDim.x * THREADS) {
        u32* out = (u32*)(tiles + tile * bytes);
        for (u32 i = 0; i < codes; i++) out[i] = random_bits(tile * words + i, seed);
        for (u32 i = 0; i < 16; i++) {
            const u32 r = random_bits(tile * words + codes + i, seed);
            const float scale = (r & 1 ? -1.0f : 1.0f) * (0.75f + (r >> 8) * (0.5f / 16777216.0f)) * deviation * sqrtf(12.0f) / steps;
            out[codes + i] = pack_bf16(scale, -0.5f * (steps - 1) * scale);
        }
    }
}

// Around a mean, roughly normal.
extern "C" __global__ void __launch_bounds__(THREADS) random_floats(float* out, u64 n, float mean, float deviation, u32 seed) {
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < n; i += (u64)gridDim.x * THREADS) {
        const u32 a = random_bits(2 * i, seed), b = random_bits(2 * i + 1, seed);
        const float sum = (a & 0xffff) + (a >> 16) + (float)((b & 0xffff) + (b >> 16));
        out[i] = mean + deviation * (sum / 65536.0f - 2.0f) * sqrtf(3.0f);
    }
}
