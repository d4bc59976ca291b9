// Which rows of a step begin with the same blocks.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "flash.h"

namespace flash {

// Keys [key_first, key_last) that lie in the same blocks for the rows order[first] .. order[last - 1].
struct Prefix {
  int32_t first, last;
  int32_t key_first, key_last;
  int32_t piece, split_first;  // how its keys are cut, set by whoever cuts them
};

// Prefixes are a tree, as system prompts and the documents behind them are: some of the rows that share one share more keys
// behind it. Each stands after those that its rows share before it.
struct Prefixes {
  std::vector<int32_t> order;  // rows, those of a prefix next to each other
  std::vector<Prefix> found;
};

// Rows are sorted by their first block, and only where that is the same are the others looked at.
template <class Pays>
class PrefixSearch {
 public:
  PrefixSearch(const std::vector<int32_t>& limits, const int32_t* blocks, int64_t stride, int64_t block_size, const Pays& pays)
      : limits(limits), blocks(blocks), stride(stride), block_size(block_size), pays(pays) {}

  Prefixes run() {
    for (size_t r = 0; r < limits.size(); r++) {
      if (limits[r] > 0) result.order.push_back(r);
    }
    divide(0, result.order.size(), 0, 0);
    return std::move(result);
  }

 private:
  const std::vector<int32_t>& limits;
  const int32_t* blocks;
  const int64_t stride;
  const int32_t block_size;
  const Pays& pays;
  Prefixes result;

  const int32_t* table(int32_t i) const { return blocks + result.order[i] * stride; }
  int32_t limit(int32_t i) const { return limits[result.order[i]]; }

  // Sorts rows that share the blocks before `depth` by the one there, and follows those that have the same. Their keys from
  // key_first on are in no prefix yet.
  void divide(int32_t first, int32_t last, int32_t depth, int32_t key_first) {
    typedef std::pair<int32_t, int32_t> BlockAndRow;
    std::vector<BlockAndRow> sorted;
    sorted.reserve(last - first);
    for (int32_t i = first; i < last; i++) sorted.emplace_back(depth < limit(i) ? table(i)[depth] : -1, result.order[i]);
    std::sort(sorted.begin(), sorted.end());
    for (int32_t i = first; i < last; i++) result.order[i] = sorted[i - first].second;
    for (int32_t i = first, next; i < last; i = next) {
      const int32_t block = sorted[i - first].first;
      for (next = i + 1; next < last && sorted[next - first].first == block;) next++;
      if (block >= 0 && next - i > 1) follow(i, next, depth + 1, key_first);
    }
  }

  // Rows that share the blocks before `depth`: as many more as all of them share, and what only some of them share behind it.
  void follow(int32_t first, int32_t last, int32_t depth, int32_t key_first) {
    const int32_t* leader = table(first);
    int32_t common = limit(first);
    for (int32_t i = first + 1; i < last; i++) {
      common = std::min(common, limit(i));
      if (std::memcmp(leader + depth, table(i) + depth, 4 * (common - depth)) == 0) continue;
      common = std::mismatch(leader + depth, leader + common, table(i) + depth).first - leader;
    }
    const int32_t key_last = common * block_size / kGroup * kGroup;  // so that no group of keys is in two prefixes
    if (key_last > key_first && pays(&result.order[first], last - first, key_last - key_first)) {
      result.found.push_back({first, last, key_first, key_last, 0, 0});
      key_first = key_last;
    }
    divide(first, last, common, key_first);
  }
};

// limits: for each row the blocks that it may share. blocks [R, stride]. pays(rows, count, keys): whether these rows are to share
// so many keys.
template <class Pays>
Prefixes find_prefixes(const std::vector<int32_t>& limits, const int32_t* blocks, int64_t stride, int64_t block_size,
                       const Pays& pays) {
  return PrefixSearch<Pays>(limits, blocks, stride, block_size, pays).run();
}

}  // namespace flash
