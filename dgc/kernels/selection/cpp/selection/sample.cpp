// Estimates the k-th largest magnitude from whole cache lines spread over a segment. The estimate need not be
// accurate: one that is too low costs candidates, one that is too high costs another pass over the segment.
#include <algorithm>
#include <cmath>

#include "choice.h"

namespace dgc {
namespace {

constexpr int64_t line = 16;
constexpr int64_t small = 4096;  // at most this many elements are collected whole
constexpr int64_t most = 65536;
constexpr int64_t ahead = 12;
constexpr double expected_above = 24;  // samples above the threshold: 24 +- 5, before a margin of 5 deviations

// The start of line i of a segment's sample. The offsets are random: equal steps could sample a single matrix column.
int64_t line_begin(const Segment& segment, int64_t lines, int64_t i) {
    const int64_t stride = segment.size / lines;
    const uint32_t random = static_cast<uint32_t>(i + 1) * 2654435769u;
    return segment.begin + i * stride + static_cast<int64_t>(random >> 8) % (stride - line + 1);
}

}  // namespace

uint32_t sampled_lower_bound(Source source, const Segment& segment, Buffer& memory) {
    if (segment.size <= small || segment.k == 0) return smallest_bits;
    const double density = static_cast<double>(segment.k) / static_cast<double>(segment.size);
    int64_t target = static_cast<int64_t>(std::min<double>(static_cast<double>(most), expected_above / density));
    int64_t lines = std::min(std::max<int64_t>(target, 1024), segment.size / 16) / line;
    float* samples = memory.room<float>(lines * line);
    const float decay = source.update == residual ? source.factor : 1.0f;
    int64_t count = 0;
    for (int64_t i = 0; i < lines; ++i) {
        if (i + ahead < lines) {
            const int64_t next = line_begin(segment, lines, i + ahead);
            __builtin_prefetch(source.v + next + line / 2);
            if (source.u) __builtin_prefetch(source.u + next + line / 2);
        }
        const int64_t begin = line_begin(segment, lines, i);
        source.sent = from(source.sent, begin);  // lines ascend
        for_stretches(source, begin, begin + line, line, [&](const Stretch& s) {
            for (int64_t j = 0; j < s.n; ++j) {
                float g = s.g && magnitude(s.g[j]) < too_large_bits ? s.g[j] : 0.0f;
                float u = s.u ? s.u[j] : 0.0f, v = s.v[j];
                if (s.sent->count && *s.sent->indices == s.first + j) {
                    v -= *s.sent->values;
                    if (s.sent->masks) u = 0.0f;
                    skip(*s.sent, 1);
                }
                u = source.update == plain      ? s.factor * u + g
                    : source.update == nesterov ? s.factor * (u + g) + g
                                                : g;
                samples[count++] = source.update == none ? v : decay * v + u;
            }
        });
    }
    const double mean = density * static_cast<double>(count);
    int64_t rank = static_cast<int64_t>(std::ceil(mean + 5 * std::sqrt(mean))) + 2;
    if (rank > count) return smallest_bits;
    const Candidates block{nullptr, samples, count};
    return std::max(cut_for(&block, 1, rank, 0, 20).threshold, smallest_bits);
}

}  // namespace dgc
