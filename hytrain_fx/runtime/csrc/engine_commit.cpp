// What step() calls: hyper-parameters fixed, updates let go.
#include <algorithm>
#include <cstring>
#include <utility>

#include "engine.h"

namespace hytrain_fx {
namespace {

constexpr int64_t kLaunchParams = 16 << 20;  // a launch of so many takes the device longer than the host
constexpr double kLongestLaunchUs = 5000;    // of one unit: what takes longer waited in front of a full queue, or for the device

}  // namespace

void Engine::commit(const CommitItem* items, int n, const void* const* factors, int n_factors, int skip, void* stream) {
  if (n_factors > options_.factor_capacity) throw std::logic_error("internal: more factors than slots");
  EventPtr end = device_->record_compute(stream);
  const double called_us = device_->now_us();
  EngineLock lock(mutex_);
  await_last_step(lock);
  throw_if_failed();
  if (factors_on_way_[commits_ % 2]) throw std::logic_error("internal: the slots for factors are in use");
  if (skip_on_way_) throw std::logic_error("internal: a commit before it is known whether the last one was left out");
  float* const slots = half_of(commits_);
  const float* const skip_at = skip < 0 ? nullptr : static_cast<const float*>(factors[skip]);
  for (int i = 0; i < n; ++i) check_committable(items[i]);  // all of them before anything is changed
  if (passed_us_ > commit_us_ && called_us - launched_us_ < launched_us_ - passed_us_) {
    finish_.launching_us = launching_us_ + launched_since(called_us);
  }
  last_launching_us_ = finish_.launching_us;
  if (following_) finish_.streamed_us = called_us - commit_us_;  // it has not ended yet
  last_finish_ = have_ended() ? finish_ : FinishTimes{};
  finish_ = {};
  streaming_params_ -= std::exchange(streamed_params_, 0);
  first_update_us_ = workers_busy_us_ = 0;
  commit_us_ = device_->now_us();
  early_.host_params = early_.landed_params = early_.waiting_params = early_.guessed_params = 0;
  bool on_lane = false;
  for (int i = 0; i < n_factors; ++i) {
    if (!factors[i]) continue;
    if (!on_lane) device_->wait(Lane::D2H, end);
    on_lane = true;
    device_->copy(Lane::D2H, slots + i, factors[i], sizeof(float));
  }
  std::vector<const CommitItem*> on_device;
  ++marks_;  // of `end`
  for (int i = 0; i < n; ++i) {
    Row& row = at(items[i].row);
    if (items[i].at_end || !row.released) {
      row.released = row.open = end;
      row.open_mark = marks_;
    }
    if (row.place == Place::DEVICE) {
      on_device.push_back(&items[i]);
      continue;
    }
    if (row.place == Place::STREAMED) {
      commit_streamed(items[i], end, skip_at);
      continue;
    }
    count_landed(row);
    const bool foreseen = was_foreseen(row, items[i]);
    if (row.phase == Phase::EARLY && !foreseen) give_up_early(row, items[i].row);
    begin_update(row, items[i]);
    row.factors_known = !skip_at && known_now(items[i], factors);
    row.guessing = foreseen || (!row.factors_known && may_guess(row, items[i].n_factors));
    if (row.factors_known) take_factors(row, slots, false);
    if (row.factors_known && row.guessing) settle_guess(row, items[i].row, true);
    count_waiting(row);
    queue_all_ready(row, items[i].row);
    if (foreseen && !row.factors_known) offer_updated_ahead(row, items[i].row);
  }
  for (int r = 0; r < static_cast<int>(rows_.size()); ++r) {
    if (rows_[r].phase == Phase::EARLY) give_up_early(rows_[r], r);
  }
  for (const auto& together : launches(on_device)) commit_on_device(together, end, skip_at);
  if (on_lane) {
    landings_.push_back({nullptr, device_->record(Lane::D2H), {}, slots, n_factors, commits_, skip});
    factors_on_way_[commits_ % 2] = true;
    landed_cv_.notify_one();
  }
  skip_on_way_ = skip_at != nullptr;
  ++commits_;
  upload_cv_.notify_one();
}

double Engine::launched_since(double now_us) const { return std::min(now_us - launched_us_, kLongestLaunchUs); }

void Engine::check_committable(const CommitItem& item) {
  const Row& row = at(item.row);
  const std::string name = "row " + std::to_string(item.row);
  if (row.place != Place::HOST) {
    if (row.phase == Phase::PENDING) throw std::runtime_error(name + " is committed while its last update is in flight");
    if (!item.grad) throw std::logic_error(name + " is updated on the device and is committed without its gradient");
    return;
  }
  if (row.phase != Phase::GRAD && row.phase != Phase::EARLY) throw std::runtime_error(name + " is committed without a gradient");
  if (!row.armed_cpu || !row.armed_reload) {
    throw std::runtime_error("dropped node: " + name + " was offloaded but its " + (row.armed_cpu ? "reload" : "cpu_step") + " node did not run");
  }
}

// Whether every factor of the item is already in its slot, rather than on its way from the device.
bool Engine::known_now(const CommitItem& item, const void* const* factors) {
  for (int i = 0; i < item.n_factors; ++i) {
    if (factors[item.factors[i]]) return false;
  }
  return true;
}

void Engine::begin_update(Row& row, const CommitItem& item) {
  if (row.phase != Phase::EARLY) {
    row.early = row.bad_guess = false;
    row.busy_us = 0;
  }
  row.phase = Phase::PENDING;
  row.guess = row.likely;
  row.scalars = item.scalars;
  row.n_factors = item.n_factors;
  std::copy(item.factors, item.factors + kMaxFactors, row.factors.begin());
  row.commit = commits_;
  row.factors_known = true;
  row.guessing = row.skipped = false;
}

// Rows on the device, by launch and in the order of the launches. A unit's rows of one kernel go together, the last unit first: its gradients
// come first. Rows whose release came with those of other units, at the end of a backward graph, go apart (they would hold back the large
// weights of their unit until then), after the others, and lowest unit first, being due in that order now.
std::vector<std::vector<const CommitItem*>> Engine::launches(const std::vector<const CommitItem*>& items) {
  using Launch = std::vector<const CommitItem*>;
  std::map<const Event*, std::set<int>> units;
  for (const CommitItem* item : items) units[at(item->row).released.get()].insert(at(item->row).spec.unit);
  std::map<std::pair<int, int>, Launch> early, late;  // by -unit and dtype, by dtype and unit
  for (const CommitItem* item : items) {
    const Row& row = at(item->row);
    const int unit = row.spec.unit, dtype = 2 * row.spec.dtype + row.copied;
    if (units[row.released.get()].size() > 1) {
      late[{dtype, unit}].push_back(item);
    } else {
      early[{-unit, dtype}].push_back(item);
    }
  }
  std::vector<Launch> found;
  for (auto& [key, group] : early) found.push_back(std::move(group));
  int64_t params = kLaunchParams;  // of the last launch; small ones are joined to it
  int joined_dtype = -1;
  for (auto& [key, group] : late) {
    if (key.first != joined_dtype || params >= kLaunchParams) {
      found.emplace_back();
      params = 0;
    }
    joined_dtype = key.first;
    for (const CommitItem* item : group) params += at(item->row).spec.numel;
    found.back().insert(found.back().end(), group.begin(), group.end());
  }
  return found;
}

// Rows of one group in one launch, behind one event: queues of streams are short, and a full one blocks the launching thread.
void Engine::commit_on_device(const std::vector<const CommitItem*>& items, const EventPtr& end, const float* skip) {
  std::set<EventPtr> awaited;
  std::vector<DeviceUpdate> updates;
  for (const CommitItem* item : items) {
    Row& row = at(item->row);
    awaited.insert(item->at_end || !row.ready || skip ? end : row.ready);
    awaited.insert(row.released);
    updates.push_back({item->grad, device_grad_dtype(row), weight_dtype(row), row.device.master, nullptr, row.device.exp_avg, row.device.exp_avg_sq,
                       row.device.max_exp_avg_sq, weight_bytes(row) == 2 ? row.spec.weight : nullptr, row.spec.numel, item->scalars, nonfinite_of(item->row), skip});
  }
  for (const EventPtr& event : awaited) device_->wait(Lane::UPDATE, event);
  EventPtr before = recording_ ? device_->record(Lane::UPDATE) : nullptr;
  device_->update(Lane::UPDATE, updates);
  EventPtr after = device_->record(Lane::UPDATE);
  if (before) lane_records_.push_back({2, items[0]->row, 0, before, after});
  for (const CommitItem* item : items) {
    Row& row = at(item->row);
    give_weight(row, after);
    row.phase = Phase::PENDING;
    row.issued = static_cast<int>(row.chunks.size());
  }
}

void Engine::commit_streamed(const CommitItem& item, const EventPtr& end, const float* skip) {
  Row& row = at(item.row);
  begin_update(row, item);
  row.grad = item.grad;
  row.skip = skip;
  if (item.at_end || !row.ready || skip) {
    row.ready = row.open = end;
    row.open_mark = marks_;
  }
  row.issued = row.streamed = 0;
  streaming_.insert({row.spec.unit, item.row, 0});
  streaming_params_ += row.spec.numel;
}

void Engine::take_factors(Row& row, const float* slots, bool skipped) {
  std::array<float, kMaxFactors> values{};
  for (int i = 0; i < row.n_factors; ++i) values[i] = slots[row.factors[i]];
  if (row.n_factors != row.n_values) row.outcomes = -1;
  auto are = [&](const std::array<float, kMaxFactors>& others) { return std::memcmp(values.data(), others.data(), sizeof values) == 0; };
  row.same = row.same << 1 | (!skipped && are(row.likely) ? 1u : 0u);
  // A value that came once, as where one step of several is clipped, is not the next one's. A new loss scale is guessed wrong twice for it.
  if (++row.outcomes == 0 || are(row.factor_values)) row.likely = values;
  row.n_values = row.n_factors;
  row.factor_values = values;
}

// Whether every update that is committed is on its way.
bool Engine::have_ended() const {
  return std::none_of(rows_.begin(), rows_.end(),
                      [](const Row& row) { return row.phase == Phase::PENDING && row.issued < static_cast<int>(row.chunks.size()); });
}

bool Engine::skipped() {
  EngineLock lock(mutex_);
  if (!issued_cv_.wait_for(lock, std::chrono::duration<double>(options_.timeout_s), [&] { return !skip_on_way_ || !failure_.empty(); })) {
    throw std::runtime_error("whether the last step was left out had not come after " + std::to_string(options_.timeout_s) + " s");
  }
  throw_if_failed();
  return skipped_;
}

float* Engine::factor_slots() {
  EngineLock lock(mutex_);
  const int half = static_cast<int>(commits_ % 2);
  if (!issued_cv_.wait_for(lock, std::chrono::duration<double>(options_.timeout_s), [&] { return !factors_on_way_[half] || !failure_.empty(); })) {
    throw std::runtime_error("the factors of the step before the last had not come after " + std::to_string(options_.timeout_s) + " s");
  }
  throw_if_failed();
  return half_of(commits_);
}

}  // namespace hytrain_fx
