// The number of elements of each chunk of the bucket in 16 bits, and their indices within chunks in 12 bits.
#include <algorithm>

#include "codec.h"

namespace dgc {
namespace {

constexpr int CHUNK_BITS = 12;
constexpr int64_t CHUNK = 1 << CHUNK_BITS;
constexpr int64_t BLOCK = 4096;  // indices that stay in the cache until their chunk is known

}  // namespace
}  // namespace dgc

using namespace dgc;

// Same contract as dgc_rice_encode, but all elements fit.
DGC_EXPORT int64_t dgc_chunks_encode(const int32_t* indices, int64_t count, int64_t, int64_t chunks, uint8_t* bytes,
                                     int64_t nbytes) {
    for (int64_t chunk = 0, at = 0; chunk < chunks; ++chunk) {
        const int64_t begin = at;
        while (at < count && indices[at] >> CHUNK_BITS == chunk) ++at;
        store(bytes + 2 * chunk, static_cast<int16_t>(at - begin));
    }
    // pack() takes the lowest bits
    pack(reinterpret_cast<const uint32_t*>(indices), count, CHUNK_BITS, {bytes, nbytes}, 16 * chunks);
    return count;
}

// Same contract as dgc_rice_decode.
DGC_EXPORT int dgc_chunks_decode(uint8_t* bytes, int64_t nbytes, int64_t count, int64_t capacity, int64_t numel,
                                 int32_t* indices) {
    const Section section{bytes, nbytes};
    const int64_t chunks = block_count(numel, CHUNK);
    if (count < 0 || count > capacity || 2 * chunks > nbytes) return 0;
    bool ascend = true;
    int64_t at = 0, unpacked = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t size = load<int16_t>(bytes + 2 * chunk);
        if (size < 0 || size > CHUNK || size > count - at) return 0;
        while (unpacked < at + size) {
            const int64_t next = std::min(BLOCK, count - unpacked);
            uint32_t* const low = reinterpret_cast<uint32_t*>(indices + unpacked);
            if (!unpack(section, 16 * chunks + CHUNK_BITS * unpacked, CHUNK_BITS, next, low)) return 0;
            unpacked += next;
        }
        int32_t* const own = indices + at;
        for (int64_t j = 1; j < size; ++j) ascend &= own[j] > own[j - 1];
        for (int64_t j = 0; j < size; ++j) own[j] += static_cast<int32_t>(chunk * CHUNK);
        at += size;
    }
    return ascend && at == count && (!count || indices[count - 1] < numel);
}
