// What happens before what between the streams of a process: vector clocks, and for each range of
// memory who used it last.
//
// A lane is a stream. Its clock says, for every lane, how many of that lane's operations are over
// when its own next operation begins. The host has a clock too: an operation begins after all that
// the host knew to be over when it launched it. Two uses of the same bytes, one of which writes, are
// in order if the later lane's clock holds the earlier operation; else a fault is noted.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace fake {

using Clock = std::vector<uint64_t>;

inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

inline bool holds(const Clock& clock, int lane, uint64_t tick) {
  return static_cast<size_t>(lane) < clock.size() && clock[lane] >= tick;
}

/// An operation on a lane.
struct Launch {
  int lane;
  uint64_t tick;
  std::string name;
};

/// Bytes [from, to) of a block.
struct Range {
  size_t from;
  size_t to;
  bool meets(const Range& other) const { return from < other.to && other.from < to; }
  bool within(const Range& other) const { return other.from <= from && to <= other.to; }
};

class Order {
 public:
  static constexpr size_t most_faults = 50;

  int lane_of(int device, int64_t stream) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    auto [place, is_new] = numbers_.try_emplace({device, stream}, static_cast<int>(lanes_.size()));
    if (is_new) {
      auto name = stream == 0 ? "the default stream" : "stream " + std::to_string(stream);
      lanes_.push_back({device, name + " of cuda:" + std::to_string(device), {}});
    }
    return place->second;
  }

  void set_name(int lane, const std::string& name) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    lanes_[lane].name = name;
  }

  /// The next operation of a lane begins.
  Launch launch(int lane, std::string name) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    auto& clock = lanes_[lane].clock;
    join(clock, host_);
    if (clock.size() <= static_cast<size_t>(lane)) clock.resize(lane + 1);
    return {lane, ++clock[lane], std::move(name)};
  }

  /// Counts a kernel that torch launches.
  void count(const std::string& kernel) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    ++kernels_[kernel];
  }

  std::map<std::string, long> take_kernels() {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    return std::exchange(kernels_, {});
  }

  /// What is over when a lane has come to its present end: what an event of it stands for.
  Clock now(int lane) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    return lanes_[lane].clock;
  }

  void wait(int lane, const Clock& event) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    join(lanes_[lane].clock, event);
  }

  void host_waits(const Clock& event) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    join(host_, event);
  }

  void host_waits_for_device(int device) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    for (const auto& lane : lanes_)
      if (lane.device == device) join(host_, lane.clock);
  }

  bool host_knows(const Launch& operation) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    return holds(host_, operation.lane, operation.tick);
  }

  /// A block of memory is handed out, to be used on `home` unless its users say otherwise: what
  /// used the memory before may still run there.
  void take(const void* address, int home) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    if (address == nullptr) return;
    auto& block = blocks_[address] = Block{home, {}, {}};
    if (home < 0 || lanes_[home].clock.size() <= static_cast<size_t>(home)) return;
    Launch before{home, lanes_[home].clock[home], "an earlier use of the memory"};
    block.uses.push_back({before, {0, std::numeric_limits<size_t>::max()}, true});
  }

  /// The allocator shall not hand the block out again before what `lane` does now is over.
  void keep_for(const void* address, int lane) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    auto block = blocks_.find(address);
    if (block != blocks_.end()) block->second.kept_for.insert(lane);
  }

  /// A block is given back: its home may use it again at once.
  void give_back(const void* address, const std::string& by) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    auto found = blocks_.find(address);
    if (found == blocks_.end()) return;
    const auto& block = found->second;
    if (block.home >= 0) {
      auto home = lanes_[block.home].clock;
      join(home, host_);
      for (const auto& use : block.uses) {
        if (use.by.lane == block.home || block.kept_for.count(use.by.lane)) continue;
        if (holds(home, use.by.lane, use.by.tick)) continue;
        note(
            "memory of " + lanes_[block.home].name + " is given back" + by + " while " +
            lanes_[use.by.lane].name + " may still use it (" + use.by.name + ")");
        break;
      }
    }
    blocks_.erase(found);
  }

  /// An operation uses bytes of a block.
  void use(const Launch& by, const void* address, Range range, bool writes) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    if (address == nullptr || range.from >= range.to) return;
    auto& uses = blocks_.try_emplace(address, Block{-1, {}, {}}).first->second.uses;
    const auto& clock = lanes_[by.lane].clock;
    for (auto use = uses.rbegin(); use != uses.rend(); ++use) {
      const auto& last = *use;
      if (!(writes || last.writes) || !last.range.meets(range)) continue;
      if (holds(clock, last.by.lane, last.by.tick)) continue;
      note(
          by.name + " on " + lanes_[by.lane].name + (writes ? " writes" : " reads") +
          " what " + last.by.name + " on " + lanes_[last.by.lane].name +
          (last.writes ? " writes" : " reads") + ", and has not waited for it");
      break;
    }
    // what is covered here says no more than this use: whoever waits for this has waited for that
    uses.erase(
        std::remove_if(
            uses.begin(), uses.end(),
            [&](const Use& last) {
              return last.range.within(range) && (writes || (!last.writes && last.by.lane == by.lane));
            }),
        uses.end());
    uses.push_back({by, range, writes});
  }

  void note(const std::string& fault) {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    if (faults_.size() < most_faults && std::find(faults_.begin(), faults_.end(), fault) == faults_.end())
      faults_.push_back(fault);
  }

  std::vector<std::string> take_faults() {
    std::lock_guard<std::recursive_mutex> guard(lock_);
    return std::exchange(faults_, {});
  }

 private:
  struct Lane {
    int device;
    std::string name;
    Clock clock;
  };
  struct Use {
    Launch by;
    Range range;
    bool writes;
  };
  struct Block {
    int home; // -1: the host's
    std::set<int> kept_for;
    std::vector<Use> uses;
  };

  std::recursive_mutex lock_;
  std::map<std::pair<int, int64_t>, int> numbers_;
  std::vector<Lane> lanes_;
  Clock host_;
  std::map<const void*, Block> blocks_;
  std::vector<std::string> faults_;
  std::map<std::string, long> kernels_;
};

/// The one of this process; it outlives all tensors.
inline Order& order() {
  static auto* only = new Order();
  return *only;
}

} // namespace fake
