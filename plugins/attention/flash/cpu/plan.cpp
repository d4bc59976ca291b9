// Cuts a step into work items.

#include "plan.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "lab/team.h"
#include "prefixes.h"

namespace flash {
namespace {

constexpr int64_t kFewLanes = 96;  // an item is not made smaller than this to give threads work
constexpr int64_t kPiece = 64;  // keys; pieces of a row are multiples of it
constexpr int64_t kSerialCost = 8192;  // less than this is done before other threads wake up
constexpr int64_t kRunCost = 8192, kLongestRun = 4;  // items are taken by so many, up to this cost, where each thread has enough

// What a key costs an item, in nanoseconds or so: it is fetched and packed, and then the work grows with the lanes, in tiles by
// whole vectors. Few lanes are served by dot products, and bound by memory.
constexpr int64_t kReadCost = 8, kVector = 16;
int64_t cost_of(int64_t keys, int64_t lanes) {
  return keys * (lanes <= kDotLanes ? 12 + 3 * lanes : kReadCost + (lanes + kVector - 1) / kVector * kVector);
}

// What sharing a prefix costs for each of its lanes, whose result then has one part more to write, read and add, and for an item.
constexpr int64_t kPartCost = 144, kItemCost = 400;

// Where a row's queries and keys are.
struct Row {
  int32_t q_first, q_count, position;
  int32_t key_first, key_last;  // keys that it attends to by itself
  int32_t shared_splits;        // parts of the keys before them, which it attends to with other rows
  int32_t shared_at;            // where its tokens are among the shared ones
  int32_t tree_start;

  // The least position in the text that a token from the one in slot `at` on has.
  int32_t least_position(int64_t at) const { return std::min<int64_t>(at, tree_start); }
};

std::vector<Row> rows_of(const StepRows& step, int64_t window) {
  std::vector<Row> rows(step.num_rows);
  for (size_t r = 0; r < rows.size(); r++) {
    const int32_t count = step.q_start[r + 1] - step.q_start[r], position = step.ctx_len[r] - count;
    const int32_t first = window ? std::max<int32_t>(0, position - int32_t(window) + 1) : 0;
    const bool has_tree = step.tree_start && step.tree_start[r] < step.ctx_len[r];
    rows[r] = {step.q_start[r], count, position, first, step.ctx_len[r], 0, 0, has_tree ? step.tree_start[r] : kNoTree};
  }
  return rows;
}

class Planner {
 public:
  std::vector<Item> items;
  std::vector<SharedToken> shared;
  int32_t num_partials = 0, num_counters = 0;

  Planner(const StepRows& step, const How& how)
      : step(step), how(how), rows(rows_of(step, how.window)), kv_heads(how.kv_heads), group(how.group), window(how.window),
        tokens(tokens_of_an_item()) {}

  // Only whole blocks are shared, and of keys that all queries of a row see: nothing of them is masked.
  void find_prefixes() {
    if (how.cascade == kCascadeNever || how.batch_invariant) return;
    std::vector<int32_t> limits(rows.size());
    for (size_t r = 0; r < rows.size(); r++) {
      const bool sees_all = rows[r].q_count > 0 && (!window || rows[r].key_last <= window);
      limits[r] = sees_all ? rows[r].position / how.block_size : 0;
    }
    const auto pays = [&](const int32_t* some, int64_t count, int64_t keys) {
      if (how.cascade != kCascadeAuto) return keys >= how.cascade;
      int64_t sum = 0, apart = 0;
      for (int64_t i = 0; i < count; i++) {
        sum += rows[some[i]].q_count;
        apart += cost_of_tokens(keys, rows[some[i]].q_count);
      }
      return apart > cost_of_tokens(keys, sum) + sum * group * kPartCost + kItemCost;
    };
    prefixes = flash::find_prefixes(limits, step.blocks, step.blocks_stride, how.block_size, pays);
    for (const Prefix& prefix : prefixes.found) {
      for (int32_t i = prefix.first; i < prefix.last; i++) rows[prefixes.order[i]].key_first = prefix.key_last;
    }
  }

  void make_items() {
    share = std::max<int64_t>(total_cost() / (4 * how.threads), 1);
    for (Prefix& prefix : prefixes.found) count_splits(prefix);
    for (int32_t r : prefixes.order) {
      if (rows[r].shared_splits == 0) continue;
      rows[r].shared_at = shared.size();
      shared.resize(shared.size() + rows[r].q_count);
    }
    for (size_t r = 0; r < rows.size(); r++) add_row(r);
    for (const Prefix& prefix : prefixes.found) add_prefix(prefix);
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
    deal_out();
  }

 private:
  const StepRows& step;
  const How& how;
  std::vector<Row> rows;
  const int64_t kv_heads, group, window;
  const int64_t tokens;  // that one item takes, at most
  Prefixes prefixes;
  int64_t share = 1;  // of the cost, for an item

  // Into the shares that threads begin with: to each in turn the dearest that is left, or for all heads the decodes of the same
  // keys. These wait for memory, and what heads read lies side by side: a thread that was just told where the pages of one
  // head's part of a block are need not ask for the next head's.
  void deal_out() {
    const int64_t count = items.size(), threads = std::min(how.threads, count);
    std::vector<std::vector<Item>> shares(threads);
    const auto is_full = [&](int64_t t) {
      return int64_t(shares[t].size()) == lab::share_begin(count, t + 1, threads) - lab::share_begin(count, t, threads);
    };
    for (int64_t i = 0, t = 0; i < count; i++) {
      if (i > 0 && !read_together(items[i - 1], items[i])) t = (t + 1) % threads;
      while (is_full(t)) t = (t + 1) % threads;
      shares[t].push_back(items[i]);
    }
    items.clear();
    for (const std::vector<Item>& share : shares) items.insert(items.end(), share.begin(), share.end());
  }

  bool read_together(const Item& a, const Item& b) const {
    return a.q_count * group <= kDotLanes && std::tie(a.row, a.key_first, a.q_first) == std::tie(b.row, b.key_first, b.q_first);
  }

  // As many tokens as share a tile's packing, unless threads would go without work.
  int64_t tokens_of_an_item() const {
    for (int64_t lanes = how.batch_invariant ? kMaxLanes / 2 : kMaxLanes; lanes >= kFewLanes; lanes /= 2) {
      const int64_t tokens = std::max<int64_t>(1, lanes / group);
      int64_t items = 0;
      for (const Row& row : rows) items += kv_heads * ((row.q_count + tokens - 1) / tokens);
      if (items >= 4 * how.threads) return tokens;
    }
    return std::max<int64_t>(1, kFewLanes / group);
  }

  int64_t cost_of_tokens(int64_t keys, int64_t count) const {
    const int64_t rest = count % tokens;
    return count / tokens * cost_of(keys, tokens * group) + (rest ? cost_of(keys, rest * group) : 0);
  }

  int64_t total_cost() const {
    int64_t total = 0;
    for (const Row& row : rows) total += kv_heads * cost_of_tokens(row.key_last - row.key_first, row.q_count);
    for (const Prefix& prefix : prefixes.found) {
      total += kv_heads * cost_of_tokens(prefix.key_last - prefix.key_first, tokens_of(prefix));
    }
    return total;
  }

  int64_t tokens_of(const Prefix& prefix) const {
    int64_t count = 0;
    for (int32_t i = prefix.first; i < prefix.last; i++) count += rows[prefixes.order[i]].q_count;
    return count;
  }

  // Keys are split when there are too few items for the threads, or as the user says.
  int64_t piece_of(int64_t keys, int64_t lanes) const {
    const int64_t enough = std::max(2 * kPiece, share / cost_of(1, lanes));
    const int64_t wanted = how.num_splits > 0 ? (keys + how.num_splits - 1) / how.num_splits : enough;
    if (how.batch_invariant) return wanted < keys ? kInvariantPiece : INT32_MAX;  // each of its pieces by itself, or all in one
    return std::max(kPiece, (wanted + kPiece - 1) / kPiece * kPiece);
  }

  void count_splits(Prefix& prefix) {
    const int64_t keys = prefix.key_last - prefix.key_first;
    prefix.piece = piece_of(keys, std::min(tokens, tokens_of(prefix)) * group);
    prefix.split_first = rows[prefixes.order[prefix.first]].shared_splits;
    for (int32_t i = prefix.first; i < prefix.last; i++) {
      rows[prefixes.order[i]].shared_splits += (keys + prefix.piece - 1) / prefix.piece;
    }
  }

  void add_row(int32_t r) {
    const Row& row = rows[r];
    for (int32_t done = 0; done < row.q_count; done += tokens) {
      const int64_t count = std::min<int64_t>(tokens, row.q_count - done), lanes = count * group;
      const int64_t position = row.position + done;
      const int64_t first = std::max<int64_t>(row.key_first, window ? row.least_position(position) - window + 1 : 0);
      const int64_t last = position + count;
      const int64_t piece = piece_of(last - first, lanes);
      const int64_t unit = how.batch_invariant ? kInvariantPiece : kPiece;
      const int64_t start = first / unit * unit;  // pieces end where groups of keys do, so that no group is in two of them
      const int64_t splits = row.shared_splits + (last - start + piece - 1) / piece;
      for (int32_t i = 0; row.shared_splits && i < count; i++) {
        shared[row.shared_at + done + i] = {int32_t(row.q_first + done + i), int32_t(num_partials + i * group), int32_t(lanes),
                                            int32_t(splits), num_counters};
      }
      for (int64_t s = row.shared_splits; s < splits; s++) {
        for (int64_t head = 0; head < kv_heads; head++) {
          const int64_t at = start + (s - row.shared_splits) * piece;
          Item item = item_of(r, head, std::max(first, at), std::min(last, at + piece), lanes);
          item.q_first = row.q_first + done, item.q_count = count;
          item.position = position;
          item.split = s, item.num_splits = splits;
          if (splits > 1) item.partial = num_partials + head * splits * lanes, item.counter = num_counters + head;
          item.tree_start = row.tree_start;
          items.push_back(item);
        }
      }
      if (splits > 1) {
        num_partials += kv_heads * splits * lanes;
        num_counters += kv_heads;
      }
    }
  }

  // Items of whole units, as many tokens as any item has.
  void add_prefix(const Prefix& prefix) {
    const Row &leader = rows[prefixes.order[prefix.first]], &last_row = rows[prefixes.order[prefix.last - 1]];
    const int32_t end = last_row.shared_at + last_row.q_count;
    for (int32_t first = leader.shared_at, last = first; first < end; first = last) {
      while (last < end && (last == first || last - first + shared[last].lanes / group <= tokens)) last += shared[last].lanes / group;
      for (int64_t head = 0; head < kv_heads; head++) {
        int32_t split = prefix.split_first;
        for (int64_t at = prefix.key_first; at < prefix.key_last; at += prefix.piece, split++) {
          const int64_t to = std::min<int64_t>(prefix.key_last, at + prefix.piece);
          Item item = item_of(prefixes.order[prefix.first], head, at, to, (last - first) * group);
          item.q_first = first, item.q_count = last - first, item.is_shared = true;
          item.position = to;
          item.split = split, item.num_splits = leader.shared_splits + 1;
          items.push_back(item);
        }
      }
    }
  }

  static Item item_of(int64_t row, int64_t head, int64_t key_first, int64_t key_last, int64_t lanes) {
    Item item{};
    item.row = row, item.kv_head = head;
    item.key_first = key_first, item.key_last = key_last;
    item.tree_start = kNoTree;
    item.cost = std::min<int64_t>(cost_of(key_last - key_first, lanes), INT32_MAX);
    return item;
  }
};

// Items that a thread takes at once: some short ones, so that little is prepared for each, and no more than keeps shares even.
int32_t run_of(const std::vector<Item>& items, int64_t threads) {
  if (items.empty()) return 1;
  const int64_t cheap = kRunCost / std::max(items.front().cost, 1), even = int64_t(items.size()) / (8 * threads);
  return std::clamp<int64_t>(std::min(cheap, even), 1, kLongestRun);
}

}  // namespace

void plan(const StepRows& step, const How& how, const std::function<void*(int64_t)>& allocate) {
  Planner planner(step, how);
  planner.find_prefixes();
  planner.make_items();
  const auto& [items, shared] = std::tie(planner.items, planner.shared);
  int64_t cost = 0;
  for (const Item& item : items) cost += item.cost;
  const int64_t num_threads = cost < kSerialCost ? 1 : std::min<int64_t>(items.size(), how.threads);
  const int64_t num_items = items.size(), num_shared = shared.size(), part_bytes = 4 * (padded_dim(how.dim) + 2);
  const int32_t num_tokens = step.q_start[step.num_rows], num_paths = step.ancestors ? num_tokens : 0;
  const int64_t bytes = sizeof(Plan) + num_items * sizeof(Item) + num_shared * sizeof(SharedToken) + 4 * planner.num_counters +
                        8 * num_paths + planner.num_partials * part_bytes;
  Plan& plan = *(Plan*)allocate(bytes);
  plan = {int32_t(num_items), int32_t(num_shared), planner.num_counters, num_tokens, int32_t(how.window), int32_t(how.isa),
          how.scale, how.softcap, int32_t(num_threads), run_of(items, num_threads), how.has_sinks, num_paths, how.batch_invariant};
  std::copy(items.begin(), items.end(), plan.items());
  std::copy(shared.begin(), shared.end(), plan.shared());
  std::fill_n(plan.arrived(), planner.num_counters, 0);
  if (num_paths) std::memcpy(plan.ancestors(), step.ancestors, 8 * num_paths);
}

}  // namespace flash
