// Python binding of the native encoder. Arrays are numpy; no torch ABI is involved.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <future>
#include <stdexcept>
#include <string>
#include <vector>

#include "encode.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace moefit {
namespace {

using Tiles = nb::ndarray<const float, nb::shape<-1, kTile>, nb::c_contig, nb::device::cpu>;
using Values = nb::ndarray<const float, nb::shape<kStates>, nb::c_contig, nb::device::cpu>;
using States = nb::ndarray<uint16_t, nb::shape<-1, kTile>, nb::c_contig, nb::device::cpu>;
using Encode = void (*)(const EncodeJob&);

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vbmi"))
        names.emplace_back("avx512");
    if (__builtin_cpu_supports("avx2")) names.emplace_back("avx2");
    names.emplace_back("plain");
    return names;
}

Encode kernel(const std::string& wanted) {
    for (const auto& name : instruction_sets()) {
        if (!wanted.empty() && name != wanted) continue;
        return name == "avx512" ? encode_avx512 : name == "avx2" ? encode_avx2 : encode_plain;
    }
    throw std::invalid_argument("this CPU has no instruction set named '" + wanted + "'");
}

void encode(Tiles tiles, Values values, States states, int twice_k, int reach, float slack, float scale,
            int threads, const std::string& isa) {
    const auto count = static_cast<int64_t>(tiles.shape(0));
    if (static_cast<int64_t>(states.shape(0)) != count) throw std::invalid_argument("states and tiles differ in length");
    if (twice_k < 2 || twice_k > 16 || (twice_k > 7 && twice_k % 2)) throw std::invalid_argument("no such K");
    if (reach < kTile / 2 || reach > kTile || reach % 2) throw std::invalid_argument("reach must be even, 128 .. 256");
    if (!(slack > 0)) throw std::invalid_argument("slack must be positive");
    const Encode run = kernel(isa);
    const int64_t workers = std::max<int64_t>(1, std::min<int64_t>(threads, count));
    nb::gil_scoped_release release;
    std::vector<std::future<void>> pieces;
    for (int64_t i = 0; i < workers; i++) {
        const int64_t begin = count * i / workers, end = count * (i + 1) / workers;
        const EncodeJob job{tiles.data() + begin * kTile, values.data(), states.data() + begin * kTile,
                            end - begin, twice_k, reach, slack, scale};
        // The caller's own thread keeps its workspace for the next call, so a single piece stays on it.
        pieces.push_back(std::async(workers == 1 ? std::launch::deferred : std::launch::async, run, job));
    }
    for (auto& piece : pieces) piece.wait();
    for (auto& piece : pieces) piece.get();  // an exception (out of memory) surfaces here, after all have stopped
}

}  // namespace
}  // namespace moefit

NB_MODULE(_native, m) {
    m.doc() = "Native trellis encoder; use moefit.quantize.encode, which checks its input.";
    m.def("encode", &moefit::encode, "tiles"_a, "values"_a, "states"_a, "twice_k"_a, "reach"_a, "slack"_a,
          "scale"_a, "threads"_a, "isa"_a = "");
    m.def("instruction_sets", &moefit::instruction_sets, "Names this CPU can run, fastest first.");
}
