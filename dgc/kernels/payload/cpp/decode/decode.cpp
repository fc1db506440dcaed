// The mean of all ranks' payloads of a bucket in one call. First each payload is decoded, then the entries of all are
// added region by region. In both parts the threads share no output, and each element is added in the order of ranks,
// so the bits do not depend on the number of threads.
#include "decode.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "codec/codec.h"
#include "common/isa.h"
#include "common/pool.h"
#include "common/scratch.h"
#include "selection/merge.h"

namespace dgc {
namespace {

constexpr int64_t region = 8192;  // its sums stay in the nearest caches
constexpr int64_t ahead = 16;  // entries: few of each payload are in one region
constexpr int64_t worth_a_thread = 65536;
constexpr int64_t spare = 16;  // the sentinel, and a cache line

// Larger than any index. It follows the last one, so that loops need not count.
constexpr int32_t sentinel = INT32_MAX;

enum Indices : int { int32 = 0, int64 = 1, packed = 2, rice = 3, chunks = 4 };
enum Values : int { cast = 0, sign = 3, int8 = 4, two_bits = 5 };  // cast: the numbers of Dtype

// What the words of a payload say, and what was found in it. The order is as in WORDS of dgc/kernels/payload/__init__.py.
enum Field : int { COUNT, NUMBER, RATIO, FORM, SEALED, INDICES_VALID, VALUES_VALID, FIELDS };

struct Form {
    int64_t nbytes, capacity, numel;
    int indices;
    int64_t index_bytes;
    int values;
    const int64_t* bounds;
    int64_t segments;
};

bool decode_indices(const Form& form, const uint8_t* section, int64_t count, int32_t* indices) {
    // the decoders of codes only read the section
    uint8_t* bytes = const_cast<uint8_t*>(section);
    const int64_t capacity = form.capacity, numel = form.numel, nbytes = form.index_bytes;
    if (form.indices == packed) return dgc_packed_decode(bytes, nbytes, count, capacity, numel, indices);
    if (form.indices == rice) return dgc_rice_decode(bytes, nbytes, count, capacity, numel, indices);
    if (form.indices == chunks) return dgc_chunks_decode(bytes, nbytes, count, capacity, numel, indices);
    return dgc_plain_decode(section, nbytes, count, capacity, numel, indices);
}

bool decode_values(const Form& form, const uint8_t* section, const int32_t* indices, int64_t count, float scale,
                   float* values) {
    const int64_t* bounds = form.bounds;
    switch (form.values) {
        case sign: return dgc_sign_decode(indices, count, bounds, form.segments, section, values);
        case int8: return dgc_int8_decode(indices, count, bounds, form.segments, section, values);
        case two_bits: return dgc_two_bit_decode(indices, count, bounds, form.segments, section, values);
        default: return dgc_cast_decode(section, count, form.values, scale, values);
    }
}

// Returns whether the payload can be merged. If not, the words say why.
bool decode(const Form& form, const uint8_t* payload, int32_t* indices, float* values, int32_t* words) {
    const int32_t count = load<int32_t>(payload);
    words[COUNT] = count;
    words[NUMBER] = load<int32_t>(payload + 4);
    words[RATIO] = load<int32_t>(payload + 16);
    words[FORM] = load<int32_t>(payload + 20);
    words[SEALED] = dgc_sealed(payload, form.nbytes);
    const uint8_t* section = payload + HEADER_BYTES;
    words[INDICES_VALID] = decode_indices(form, section, count, indices);
    words[VALUES_VALID] = 0;
    if (!words[INDICES_VALID]) return false;
    indices[count] = sentinel;
    section += form.index_bytes;
    words[VALUES_VALID] = decode_values(form, section, indices, count, load<float>(payload + 12), values);
    return words[SEALED] && words[VALUES_VALID];
}

// Writes the mean of elements begin .. end - 1. Returns whether it is finite.
bool mean_of_range(const std::vector<Part>& parts, int64_t begin, int64_t end, float size, bool streaming,
                   float* sums, float* dense) {
    const auto divide = decode_kernels().divide;
    std::vector<const int32_t*> next;
    for (const Part& part : parts)
        next.push_back(std::lower_bound(part.indices, part.indices + part.count, begin));
    std::fill(sums, sums + region, 0.0f);
    bool finite = true;
    for (; begin < end; begin += region) {
        const int64_t stop = std::min(begin + region, end);
        for (size_t p = 0; p < parts.size(); ++p) {
            const int32_t* at = next[p];
            const float* value = parts[p].values + (at - parts[p].indices);
            for (; *at < stop; ++at, ++value) sums[*at - begin] += *value;
            __builtin_prefetch(at + ahead);
            __builtin_prefetch(value + ahead);
            next[p] = at;
        }
        finite &= divide(sums, stop - begin, 1.0f, size, streaming, dense + begin);
    }
    return finite;
}

}  // namespace

const DecodeKernels& decode_kernels() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return decode_avx512;
    if (isa() == Isa::avx2) return decode_avx2;
#endif
    return decode_portable;
}

}  // namespace dgc

using namespace dgc;

// payloads: `ranks` addresses of `nbytes` bytes each. words: FIELDS numbers per payload. Returns -1, and no mean, if a
// payload is not valid. Else, with into_dense: 1 if the mean, written to dense, is finite, or 0. Without: the number of
// entries written to indices and values, which have space for all entries of all payloads.
DGC_EXPORT int64_t dgc_decode_mean(const uint8_t* const* payloads, int ranks, int64_t nbytes, int64_t capacity,
                                   int64_t numel, int index_kind, int64_t index_bytes, int value_kind,
                                   const int64_t* bounds, int64_t segments, float size, int32_t* words,
                                   int into_dense, float* dense, int64_t* indices, float* values, int threads) {
    const Form form{nbytes, capacity, numel, index_kind, index_bytes, value_kind, bounds, segments};
    const int64_t room = capacity + spare, entries = ranks * capacity;
    Lease scratch(threads);
    int32_t* const decoded_indices = scratch->units.room<int32_t>(ranks * room);
    float* const decoded_values = scratch->active.room<float>(ranks * room);
    std::vector<Part> parts(ranks);
    std::atomic<bool> valid{true};
    std::atomic<int> next{0};
    const auto limit = [&](int64_t work) {
        return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, work / worth_a_thread)));
    };
    parallel_for(limit(entries), [&](int) {
        for (int p; (p = next.fetch_add(1)) < ranks;) {
            int32_t* const own_indices = decoded_indices + p * room;
            float* const own_values = decoded_values + p * room;
            if (!decode(form, payloads[p], own_indices, own_values, words + p * FIELDS)) valid = false;
            parts[p] = {own_indices, own_values, words[p * FIELDS + COUNT]};
        }
    });
    if (!valid) return -1;
    if (!into_dense) return merge_mean(parts, size, numel, indices, values, threads);
    threads = limit(numel);
    std::atomic<bool> finite{true};
    parallel_for(threads, [&](int t) {
        const int64_t begin = part_begin(numel, threads, t, region), end = part_begin(numel, threads, t + 1, region);
        float* sums = scratch->threads[t].values.room<float>(region);
        if (!mean_of_range(parts, begin, end, size, numel >= large, sums, dense)) finite = false;
    });
    return finite;
}
