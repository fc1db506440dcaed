// Payload headers with their checksum, plain indices, and thinning of a selection that does not fit.
#include <algorithm>

#include "codec.h"

namespace dgc {
namespace {

constexpr uint32_t CHECKSUM_OF_ZEROS = 0x44474331;

// The checksum of a payload, computed with the checksum field as zero.
uint32_t checksum(const uint8_t* payload, int64_t nbytes) {
    // Rows of 4 words. With the sums A of a column's words w_t and S of the sums of its first words, t = 0 .. T - 1:
    // S = sum of (T - t) w_t, so the sum of t w_t is T A - S. The loop needs no products, so it is vectorized.
    constexpr int64_t columns = 4;
    const int64_t words = nbytes / 8, rows = words / columns;
    uint64_t sums[columns] = {}, sums_of_sums[columns] = {}, total = 0;
    for (int64_t t = 0; t < rows; ++t) {
        for (int64_t c = 0; c < columns; ++c) {
            sums[c] += load<uint64_t>(payload + 8 * (columns * t + c));
            sums_of_sums[c] += sums[c];
        }
    }
    for (uint64_t c = 0; c < columns; ++c) {
        const uint64_t by_row = static_cast<uint64_t>(rows) * sums[c] - sums_of_sums[c];
        total += 2 * columns * by_row + (2 * c + 1) * sums[c];
    }
    for (int64_t i = rows * columns; i < words; ++i) {
        total += load<uint64_t>(payload + 8 * i) * static_cast<uint64_t>(2 * i + 1);
    }
    total -= uint64_t{3} * load<uint32_t>(payload + 8);
    return static_cast<uint32_t>(total ^ total >> 32) ^ CHECKSUM_OF_ZEROS;
}

template <class Index>
bool plain_decode(const uint8_t* section, int64_t count, int64_t numel, int32_t* indices) {
    int64_t before = -1;
    bool valid = true;
    for (int64_t j = 0; j < count; ++j) {
        int64_t index = load<Index>(section + j * static_cast<int64_t>(sizeof(Index)));
        valid &= index > before;
        before = index;
        indices[j] = static_cast<int32_t>(index);
    }
    return valid && before < numel;
}

}  // namespace
}  // namespace dgc

using namespace dgc;

// count, first_nonfinite and scale point to one number each. ratio, form: see Terms in dgc/kernels/payload/__init__.py.
DGC_EXPORT void dgc_seal(uint8_t* payload, int64_t nbytes, const int32_t* count, const int64_t* first_nonfinite,
                         const int64_t* bounds, int64_t size, const float* scale, float ratio, uint32_t form) {
    int64_t number = std::upper_bound(bounds, bounds + size, *first_nonfinite) - bounds;
    store<int32_t>(payload, *count);
    store<int32_t>(payload + 4, static_cast<int32_t>(number % size));
    store<uint32_t>(payload + 8, 0);
    store<float>(payload + 12, *scale);
    store<float>(payload + 16, ratio);
    store<uint32_t>(payload + 20, form);
    store<uint32_t>(payload + 8, checksum(payload, nbytes));
}

DGC_EXPORT int dgc_sealed(const uint8_t* payload, int64_t nbytes) {
    return load<uint32_t>(payload + 8) == checksum(payload, nbytes);
}

// Writes `size` bytes (4 or 8) for each index.
DGC_EXPORT void dgc_plain_encode(const int32_t* indices, int64_t capacity, int64_t size, uint8_t* section) {
    for (int64_t j = 0; j < capacity; ++j) {
        if (size == 8) store<int64_t>(section + 8 * j, indices[j]);
        else store<int32_t>(section + 4 * j, indices[j]);
    }
}

// Writes and seals a whole payload: plain indices of `index_size` bytes, then values as in dgc_cast_encode.
DGC_EXPORT void dgc_encode_plain(const int32_t* indices, const float* values, int64_t capacity, const int32_t* count,
                                 int64_t index_size, int dtype, float limit, const int64_t* first_nonfinite,
                                 const int64_t* bounds, int64_t size, float ratio, uint32_t form, uint8_t* payload,
                                 int64_t nbytes, float* decoded) {
    uint8_t* section = payload + HEADER_BYTES;
    float scale;
    dgc_plain_encode(indices, capacity, index_size, section);
    section += capacity * index_size;
    dgc_cast_encode(values, capacity, dtype, limit, section, decoded, &scale);
    std::fill(section + capacity * size_of(dtype), payload + nbytes, uint8_t{0});
    dgc_seal(payload, nbytes, count, first_nonfinite, bounds, size, &scale, ratio, form);
}

// Same contract as dgc_rice_decode.
DGC_EXPORT int dgc_plain_decode(const uint8_t* section, int64_t nbytes, int64_t count, int64_t capacity,
                                int64_t numel, int32_t* indices) {
    if (count < 0 || count > capacity) return 0;
    if (nbytes == 8 * capacity) return plain_decode<int64_t>(section, count, numel, indices);
    return plain_decode<int32_t>(section, count, numel, indices);
}

// Copies `kept` evenly spaced elements: output j is element j * count / kept.
DGC_EXPORT void dgc_thin(const int32_t* indices, const float* values, int64_t count, int64_t kept,
                         int32_t* kept_indices, float* kept_values) {
    for (int64_t j = 0, at = 0, rest = 0; j < kept; ++j) {
        kept_indices[j] = indices[at];
        kept_values[j] = values[at];
        at += count / kept;
        rest += count % kept;
        if (rest >= kept) {
            rest -= kept;
            ++at;
        }
    }
}
