// The trellis encoder, written once and compiled for each instruction set.
//
// Terms (QTIP, and docs/exl3.md): S_t = (S_{t-1} << D(t) | symbol_t) mod 2^16 is the state at ring position t and
// codebook[S_t] its value. The node entering position t is S_t >> D(t): the bits S_{t-1} and S_t share. Read backwards,
// with the bits of every state reversed, the ring is a trellis of the same kind: Side is written once and used twice.
//
// 1. Bounds (bounds.h). Each side runs the dense recursion over the `reach` positions before position 0, from a free
//    start, and keeps the rows: the least that it takes to come to a node from outside. The ring is closed at the node
//    before position 0 where both sides' costs have the smallest sum.
// 2. Search. From there each side walks 128 positions and follows the paths whose cost, with the other side's bound on
//    what is still to come, stays within `slack` of the bound at the start. They meet at position 128; the cheapest
//    meeting wins, and while there is none slack is doubled. About 2,000 of 256 x 8192 nodes (K = 3) are visited.
//
// Reach is more than 128, so that the bounds know something of the other side where the two walks meet. Costs of the
// search are float32: the bounds' arithmetic decides only where the ring is closed and what is cut off.
#pragma once
#include <vector>

#include "bounds.h"

namespace moefit {
namespace {

constexpr int kHalf = kTile / 2;
constexpr float kLimit = 16.0f;  // weights are clamped: no codebook value reaches 4
constexpr float kCoarser = 0.70710678f;  // 8-bit units twice as large

inline int reverse_bits(int x, int count) {
    x = (x & 0x5555) << 1 | (x >> 1 & 0x5555);
    x = (x & 0x3333) << 2 | (x >> 2 & 0x3333);
    x = (x & 0x0F0F) << 4 | (x >> 4 & 0x0F0F);
    return ((x & 0xFF) << 8 | x >> 8) >> (16 - count);
}

struct Visit {  // of a node in the search, by the cheapest path to it
    float cost;
    uint16_t state;
    int parent;  // in the list of visits
};

template <class V>
class Side {
    using Cost = typename V::Cost;

    struct Edge {
        Visit visit;
        const Cost* bound;
    };

   public:
    // values: in this side's bit order.
    Side(const float* values, const EncodeJob& job)
        : twice_k_(job.twice_k), reach_(job.reach), stride_((kStates >> job.twice_k / 2) + 64 / sizeof(Cost)),
          values_(values, values + kStates), bounds_(values, job), rows_(size_t{kHalf + 3} * stride_),
          offset_(reach_ + 1), least_(reach_ + 1), place_(kStates >> job.twice_k / 2) {}

    // t: position in this side's order.
    void load(int t, float weight) { weights_[t] = weight; }

    const Cost* last_row() const { return row(reach_); }
    float arriving(int node) const { return cost(reach_, last_row()[node]); }

    // False where a row does not fit.
    bool run() {
        std::fill_n(row(0), nodes(0), Cost{0});
        Cost smallest = 0;
        for (int i = 0; i < reach_; i++) {
            offset_[i + 1] = offset_[i] + Bounds<V>::offset(smallest);
            smallest = step(weights_[(i - reach_) & (kTile - 1)], i, smallest);
            least_[i + 1] = bounds_.cost(smallest, offset_[i + 1]);
            if (!Bounds<V>::fits(smallest)) return false;
        }
        return true;
    }

    // Starts a search under the other side's bounds from `node`, in this side's bit order.
    void start(const Side& other, int node, float slack) {
        limit_ = other.cost(reach_, *other.bound(reach_, node)) + slack;
        std::fill(place_.begin(), place_.end(), -1);
        visits_.assign(1, {0.0f, static_cast<uint16_t>(node), -1});
        begin_ = 0;
    }

    // Step u of the search, in two parts so that one side works while the other's bounds come from memory. First the
    // edges that the row's smallest bound does not cut off, a quarter of them. (Appending without a branch spares
    // mispredictions.) Then visits by those that their own bound lets live.
    void expand(const Side& other, int u) {
        const int in = width(u), row = reach_ - 1 - u, mask = nodes(u + 1) - 1;
        const float w = weights_[u], limit = limit_, least = other.least_[row];
        const size_t most = (visits_.size() - begin_) << in;
        if (edges_.size() < most) edges_.resize(most);
        Edge* edge = edges_.data();
        for (int v = begin_; v < end(); v++) {
            const Visit from = visits_[v];
            const int first = (from.state & (nodes(u) - 1)) << in;
            for (int s = first; s < first + (1 << in); s++) {
                const float d = values_[s] - w;
                edge->visit = {from.cost + d * d, static_cast<uint16_t>(s), v};
                edge += edge->visit.cost + least <= limit;
            }
        }
        edges_end_ = edge;
        for (edge = edges_.data(); edge < edges_end_; edge++) {
            edge->bound = other.bound(row, edge->visit.state & mask);
            __builtin_prefetch(edge->bound);
        }
    }

    void keep(const Side& other, int u) {
        const int row = reach_ - 1 - u, mask = nodes(u + 1) - 1, next = end();
        const float limit = limit_;
        Edge* alive = edges_.data();
        for (const Edge* e = alive; e < edges_end_; e++) {
            *alive = *e;
            alive += e->visit.cost + other.cost(row, *e->bound) <= limit;
        }
        for (const Edge* e = edges_.data(); e < alive; e++) {
            const Visit& visit = e->visit;
            int& place = place_[visit.state & mask];
            if (place < next) {
                place = end();
                visits_.push_back(visit);
                __builtin_prefetch(&values_[(visit.state & mask) << width(u + 1)]);
            } else if (Visit& known = visits_[place];
                       visit.cost < known.cost || (visit.cost == known.cost && visit.state < known.state)) {
                known = visit;
            }
        }
        begin_ = next;
    }

    // Visits of the last step, and a node's latest visit, which is one of them if it is not smaller than begin().
    int begin() const { return begin_; }
    int end() const { return static_cast<int>(visits_.size()); }
    const Visit& visit(int v) const { return visits_[v]; }
    int place(int node) const { return place_[node]; }

   private:
    // Row i of the bounds and step i of the search belong to nodes that i steps lead to. Widths depend on the parity of
    // a position and reach is even, so both sides have the same width at i.
    int width(int i) const { return symbol_width(i, twice_k_); }
    int nodes(int i) const { return kStates >> width(i); }

    // The search reads the last 129 rows; those before take turns in two places.
    Cost* row(int i) const {
        const int unread = reach_ - kHalf;
        return rows_.data() + static_cast<size_t>(i < unread ? i % 2 : i - unread + 2) * stride_;
    }

    Cost step(float w, int i, Cost smallest) {
        switch (width(i) * 16 + width(i + 1)) {
#define MOEFIT_STEP(a, b) case a * 16 + b: return bounds_.template step<a, b>(w, row(i), smallest, row(i + 1));
            MOEFIT_STEP(1, 1) MOEFIT_STEP(2, 2) MOEFIT_STEP(3, 3) MOEFIT_STEP(4, 4)
            MOEFIT_STEP(5, 5) MOEFIT_STEP(6, 6) MOEFIT_STEP(7, 7) MOEFIT_STEP(8, 8)
            MOEFIT_STEP(1, 2) MOEFIT_STEP(2, 1) MOEFIT_STEP(2, 3) MOEFIT_STEP(3, 2) MOEFIT_STEP(3, 4) MOEFIT_STEP(4, 3)
#undef MOEFIT_STEP
        }
        return {};
    }

    const Cost* bound(int i, int node) const { return row(i) + reverse_bits(node, 16 - width(i)); }
    float cost(int i, Cost kept) const { return bounds_.cost(kept, offset_[i]); }

    const int twice_k_, reach_, stride_;
    const std::vector<float> values_;
    float weights_[kTile];
    const Bounds<V> bounds_;
    Buffer<Cost> rows_;         // [2 + 129, stride]
    std::vector<int> offset_;   // [reach + 1] units subtracted from a row
    std::vector<float> least_;  // [reach + 1] smallest cost of a row
    float limit_ = 0.0f;
    std::vector<Visit> visits_;
    std::vector<int> place_;  // [nodes]
    std::vector<Edge> edges_;
    Edge* edges_end_ = nullptr;
    int begin_ = 0;
};

inline std::vector<float> mirrored(const float* values) {
    std::vector<float> m(kStates);
    for (int s = 0; s < kStates; s++) m[s] = values[reverse_bits(s, 16)];
    return m;
}

template <class V>
class Encoder {
   public:
    explicit Encoder(const EncodeJob& job)
        : slack_(job.slack), node_bits_(16 - symbol_width(0, job.twice_k)), ahead_(job.values, job),
          behind_(mirrored(job.values).data(), job) {}

    // False if 8-bit bounds do not fit.
    bool encode(const float* tile, uint16_t* states) {
        for (int t = 0; t < kTile; t++) {
            const float w = std::clamp(tile[t], -kLimit, kLimit);
            ahead_.load(t, w);
            behind_.load(kTile - 1 - t, w);
        }
        if (!ahead_.run() || !behind_.run()) return false;
        const int node = closing_node();
        // A tile that is easier than most has more paths within the usual slack than it needs.
        const float whole = ahead_.arriving(node) + behind_.arriving(reversed(node));
        for (float slack = std::clamp(whole / 80, slack_ / 64, slack_);; slack *= 2) {
            ahead_.start(behind_, node, slack);
            behind_.start(ahead_, reversed(node), slack);
            for (int u = 0; u < kHalf; u++) {
                ahead_.expand(behind_, u);
                behind_.expand(ahead_, u);
                ahead_.keep(behind_, u);
                behind_.keep(ahead_, u);
            }
            if (meet(states)) return true;
        }
    }

   private:
    int reversed(int node) const { return reverse_bits(node, node_bits_); }

    int closing_node() const {
        const auto *a = ahead_.last_row(), *b = behind_.last_row();
        const auto least = *std::min_element(b, b + (1 << node_bits_));
        int best = 0;
        auto cost = a[0] + b[0];
        for (int n = 1; n < 1 << node_bits_; n++)
            if (a[n] + least < cost && a[n] + b[reversed(n)] < cost) best = n, cost = a[n] + b[reversed(n)];
        return best;
    }

    // Joins the cheapest two paths that end in the same node, the lowest among equals.
    bool meet(uint16_t* states) const {
        int a = -1, b = -1, node = 0;
        float cheapest = std::numeric_limits<float>::infinity();
        for (int v = ahead_.begin(); v < ahead_.end(); v++) {
            const int n = ahead_.visit(v).state & ((1 << node_bits_) - 1), other = behind_.place(reversed(n));
            if (other < behind_.begin()) continue;
            const float cost = ahead_.visit(v).cost + behind_.visit(other).cost;
            if (cost < cheapest || (cost == cheapest && n < node)) cheapest = cost, node = n, a = v, b = other;
        }
        if (a < 0) return false;
        for (int t = kHalf - 1; t >= 0; t--, a = ahead_.visit(a).parent) states[t] = ahead_.visit(a).state;
        for (int t = kHalf; t < kTile; t++, b = behind_.visit(b).parent)
            states[t] = static_cast<uint16_t>(reverse_bits(behind_.visit(b).state, 16));
        return true;
    }

    const float slack_;
    const int node_bits_;
    Side<V> ahead_, behind_;
};

// An encoder that a thread keeps between calls: LDLQ asks for a few tiles at a time, and filling megabytes anew each
// time would cost a tenth of the work. Rebuilt when the codebook or the options change.
template <class V, bool Coarse = false>
class Workspace {
    const std::vector<float> values_;
    const EncodeJob job_;
    Encoder<V> encoder_;

    static EncodeJob scaled(EncodeJob job) {
        if (Coarse) job.scale *= kCoarser;
        return job;
    }

    bool serves(const EncodeJob& job) const {
        return job_.twice_k == job.twice_k && job_.reach == job.reach && job_.slack == job.slack &&
               job_.scale == job.scale &&
               std::memcmp(values_.data(), job.values, kStates * sizeof(float)) == 0;
    }

   public:
    explicit Workspace(const EncodeJob& job) : values_(job.values, job.values + kStates), job_(job), encoder_(scaled(job)) {}

    static Encoder<V>& of(const EncodeJob& job) {
        thread_local std::unique_ptr<Workspace> kept;
        if (!kept || !kept->serves(job)) {
            kept.reset();  // first: two would not fit where one does
            kept = std::make_unique<Workspace>(job);
        }
        return kept->encoder_;
    }
};

// With the finest bounds that fit the tile.
template <class Bytes, class Floats>
void encode_with(const EncodeJob& job) {
    Encoder<Bytes>*fine = nullptr, *coarse = nullptr;
    Encoder<Floats>* floats = nullptr;
    for (int64_t i = 0; i < job.count; i++) {
        const float* tile = job.tiles + i * kTile;
        uint16_t* states = job.states + i * kTile;
        if (job.scale > 0) {
            if (!fine) fine = &Workspace<Bytes>::of(job);
            if (fine->encode(tile, states)) continue;
            if (!coarse) coarse = &Workspace<Bytes, true>::of(job);
            if (coarse->encode(tile, states)) continue;
        }
        if (!floats) floats = &Workspace<Floats>::of(job);
        floats->encode(tile, states);
    }
}

}  // namespace
}  // namespace moefit
