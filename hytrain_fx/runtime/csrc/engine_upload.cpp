// The uploader: all that goes to the device. New weights of rows updated on the host, and states of streamed rows on a visit.
//
// Both go through one lane, in an order decided here: two streams would share the link as the hardware likes, which serves one of them
// until it runs dry (seen on an H200: new weights waited for 200 ms behind streamed states). What comes next is decided when the lane
// has room, not before: the lowest unit, as everywhere. Where nothing is due, states are brought for the update that may come next.
#include <algorithm>
#include <chrono>
#include <tuple>

#include "engine.h"

namespace hytrain_fx {
namespace {

// Bytes on their way to the device at once: enough to keep the link busy, few enough to let an urgent layer pass soon.
constexpr int64_t kBytesInFlight = 48 << 20;
constexpr auto kPoll = std::chrono::microseconds(100);

}  // namespace

void Engine::set_staging(const StagingMemory& memory) {
  std::vector<StagingSlot> slots;
  {
    std::lock_guard lock(mutex_);
    slots = staging_;
  }
  for (const StagingSlot& slot : slots) {  // no row is in flight: nobody begins another visit
    if (slot.stored) slot.stored->sync();
  }
  std::lock_guard lock(mutex_);
  staging_.assign(memory.slots, {});
  for (int s = 0; s < memory.slots; ++s) {
    for (int a = 0; a < memory.arrays; ++a) staging_[s].at[a] = memory.base + (s * memory.arrays + a) * memory.slot_params;
  }
}

void Engine::upload() {
  device_->bind_thread();
  std::deque<InFlight> in_flight;
  int64_t bytes = 0;
  EngineLock lock(mutex_);
  while (true) {
    upload_cv_.wait(lock, [this] { return stop_ || !updated_.empty() || !ahead_.empty() || !streaming_.empty() || rest_is_near(); });
    if (stop_) return;
    ask_events(lock);
    if (may_send_rest()) {
      if (send_rest(lock)) {
        in_flight.clear();
        bytes = 0;
      }
      continue;
    }
    if (bytes >= kBytesInFlight) {
      InFlight first = in_flight.front();
      in_flight.pop_front();
      bytes -= first.bytes;
      lock.unlock();
      first.end->sync();
      lock.lock();
      continue;
    }
    const Upload next = next_upload();
    if (next.row < 0) {  // what is updated is still being read, or no staging slot is free: ask again soon
      upload_cv_.wait_for(lock, kPoll);
      continue;
    }
    const InFlight sent = next.load == Load::STATES  ? stream_chunk(next, lock)
                          : next.load == Load::AHEAD ? issue_ahead(next, lock)
                                                     : issue_reload(next, lock);
    if (!sent.end) continue;
    in_flight.push_back(sent);
    bytes += sent.bytes;
  }
}

// Asks for the events that the choice of what comes next goes by, as far as it does. Without the lock: the driver may take milliseconds, and
// whoever launches would wait for the lock meanwhile. The choice itself is made with the lock, by what is known: an event that a row was given
// in between counts as one that has not come, and is asked for the next time.
void Engine::ask_events(EngineLock& lock) const {
  enum { kRest, kReleased, kOpen, kStored, kChoices };
  std::array<std::vector<EventPtr>, kChoices> asked;
  auto add = [&asked](int choice, const EventPtr& event) {  // rows that come one after the other often share an event
    std::vector<EventPtr>& events = asked[choice];
    if (!event->known_done() && (events.empty() || events.back() != event)) events.push_back(event);
    return event->known_done();
  };
  if (rest_is_near()) {
    for (const Key& key : streaming_) add(kRest, rows_[key[1]].open);
    for (const Row& row : rows_) {
      if (awaits_copies(row)) add(kRest, row.released);
    }
  }
  for (const Key& key : updated_.empty() ? ahead_ : updated_) {
    const Row& row = rows_[key[1]];
    if (row.armed_reload && row.released && add(kReleased, row.released)) break;
  }
  for (const Key& key : streaming_) {
    if (add(kOpen, rows_[key[1]].open)) break;
  }
  for (const StagingSlot& slot : staging_) {
    if (streaming_.empty() || !slot.stored || add(kStored, slot.stored)) break;
  }
  if (std::all_of(asked.begin(), asked.end(), [](const auto& events) { return events.empty(); })) return;
  lock.unlock();
  for (int choice = 0; choice < kChoices; ++choice) {
    for (const EventPtr& event : asked[choice]) {
      if (event->done() == (choice != kRest)) break;  // of the rest all must have come, else the first that has is taken
    }
  }
  lock.lock();
}

Engine::Upload Engine::next_upload() {
  bool ready = false;
  StagingSlot* slot = streaming_.empty() ? nullptr : free_staging_slot();
  const int streamed = slot ? next_streamed(ready) : -1;
  const Key* reload = next_of(updated_);
  if (streamed >= 0 && (!reload || (ready && std::tie(rows_[streamed].spec.unit, streamed) < std::tie((*reload)[0], (*reload)[1])))) {
    return {streamed, rows_[streamed].streamed, Load::STATES, slot};
  }
  const Key* ahead = reload ? nullptr : next_of(ahead_);
  if (ahead) return {(*ahead)[1], (*ahead)[2], Load::AHEAD};
  return reload ? Upload{(*reload)[1], (*reload)[2]} : Upload{};
}

// ---- new weights ----

// The first whose weight nobody reads any more.
const Engine::Key* Engine::next_of(const std::set<Key>& keys) const {
  for (const Key& key : keys) {
    const Row& row = rows_[key[1]];
    if (row.armed_reload && row.released && row.released->known_done()) return &key;
  }
  return nullptr;
}

// Where an update by the CPU leaves it: a 16-bit weight takes the place of its gradient, but for the half of a master that is the weight.
const void* Engine::new_weight(const Row& row) { return row.host.low || weight_bytes(row) == 4 ? row.host.master : row.host.out; }

Engine::InFlight Engine::issue_reload(const Upload& upload, EngineLock& lock) {
  Row& row = rows_[upload.row];
  const Chunk& chunk = row.chunks[upload.chunk];
  updated_.erase({row.spec.unit, upload.row, upload.chunk});
  const bool recording = recording_;
  lock.unlock();
  sleep_us(reload_delay_us_);
  if (fail_copy_row_ == upload.row) throw std::runtime_error("injected failure in row " + std::to_string(upload.row));
  if (upload.load == Load::FLAGGED) device_->wait_flag(Lane::H2D, chunk.flag, chunk.raised);
  const InFlight sent = copy_weight(row, upload, recording);
  lock.lock();
  note_copy(upload, sent);
  weight_was_sent(row, sent.end, ++issues_);
  return sent;
}

Engine::InFlight Engine::copy_weight(const Row& row, const Upload& upload, bool recording) {
  const Chunk& chunk = row.chunks[upload.chunk];
  const int64_t size = weight_bytes(row), at = chunk.begin * size, bytes = (chunk.end - chunk.begin) * size;
  EventPtr before = recording ? device_->record(Lane::H2D) : nullptr;
  device_->copy(Lane::H2D, offset(row.spec.weight, at), offset(new_weight(row), at), bytes);
  return {device_->record(Lane::H2D), bytes, before};
}

void Engine::note_copy(const Upload& upload, const InFlight& copy) {
  if (copy.begin) lane_records_.push_back({3, upload.row, upload.chunk, copy.begin, copy.end});
}

// Copies of one row's chunks come in any order; the last one on the lane is what a reader waits for.
void Engine::weight_was_sent(Row& row, const EventPtr& end, uint64_t issue) {
  if (issue > row.issue) {
    give_weight(row, end);
    row.issue = issue;
  }
  if (++row.issued == static_cast<int>(row.chunks.size())) {
    row.last_busy_us = row.busy_us;
    issued_cv_.notify_all();
  }
}

// With the lock held: the factors must not come meanwhile. Nothing, where they have come before.
Engine::InFlight Engine::issue_ahead(const Upload& upload, EngineLock& lock) {
  lock.unlock();
  sleep_us(reload_delay_us_);
  lock.lock();
  Row& row = rows_[upload.row];
  if (!ahead_.erase({row.spec.unit, upload.row, upload.chunk})) return {};
  const InFlight sent = copy_weight(row, upload, recording_);
  note_copy(upload, sent);
  Chunk& chunk = row.chunks[upload.chunk];
  chunk.ahead = sent.end;
  chunk.ahead_issue = ++issues_;
  guesses_.sent += chunk.end - chunk.begin;
  return sent;
}

// ---- streamed states ----

// The row whose next chunk goes first and whether it may be updated; -1 where none is committed. Where none may, that which may first: updates
// run in the order in which their states are sent, and one that has to wait for the end of the backward, as a norm's, would hold up all others.
int Engine::next_streamed(bool& ready) {
  int first = -1;
  for (const Key& key : streaming_) {
    const Row& row = rows_[key[1]];
    ready = row.open->known_done();
    if (ready) return key[1];
    if (first < 0 || row.open_mark < rows_[first].open_mark) first = key[1];
  }
  return first;
}

Engine::StagingSlot* Engine::free_staging_slot() {
  for (StagingSlot& slot : staging_) {
    if (!slot.stored || slot.stored->known_done()) return &slot;
  }
  return nullptr;
}

// The one whose last visit ends first, though it may not have ended.
Engine::StagingSlot* Engine::next_staging_slot() {
  return &*std::min_element(staging_.begin(), staging_.end(), [](const auto& a, const auto& b) { return a.visit < b.visit; });
}

Engine::InFlight Engine::stream_chunk(const Upload& upload, EngineLock& lock) {
  Row& row = rows_[upload.row];  // its phase is PENDING: nobody else changes what is read here
  const Chunk& chunk = row.chunks[upload.chunk];
  const int chunks = static_cast<int>(row.chunks.size());
  const HostStates& host = row.host;
  if (++row.streamed == chunks) streaming_.erase({row.spec.unit, upload.row, 0});
  streamed_params_ += chunk.end - chunk.begin;
  upload.slot->visit = ++visits_;
  const bool recording = recording_, sends_weight = host.low && row.sends_weight;
  const int64_t n = chunk.end - chunk.begin, width = weight_bytes(row), grad_width = bytes_of(device_grad_dtype(row));
  struct Array {
    void* home;
    int64_t width;  // bytes of one element
  };
  const std::array<Array, 4> arrays{{host.low ? Array{host.low, 2} : Array{host.master, 4},
                                     {host.exp_avg, 4}, {host.exp_avg_sq, 4}, {host.max_exp_avg_sq, 4}}};
  const std::array<float*, 4>& visit = upload.slot->at;
  void* const weight = offset(row.spec.weight, chunk.begin * width);
  auto record = [&](Lane lane) { return recording ? device_->record(lane) : nullptr; };
  int64_t bytes = 0;
  lock.unlock();

  if (upload.slot->stored) device_->wait(Lane::H2D, upload.slot->stored);
  if (row.stored) device_->wait(Lane::H2D, row.stored);  // the last step's way home
  EventPtr in_begin = record(Lane::H2D);
  for (int a = 0; a < 4; ++a) {
    const auto& [home, size] = arrays[a];
    if (!home) continue;
    device_->copy(Lane::H2D, visit[a], offset(home, chunk.begin * size), n * size);
    bytes += n * size;
  }
  EventPtr in = device_->record(Lane::H2D);
  for (const EventPtr& event : {in, row.ready, row.released}) device_->wait(Lane::STREAM_UPDATE, event);
  EventPtr update_begin = record(Lane::STREAM_UPDATE);
  device_->update(Lane::STREAM_UPDATE,
                  {{offset(row.grad, chunk.begin * grad_width), device_grad_dtype(row), weight_dtype(row), host.low ? nullptr : visit[0],
                    host.low ? reinterpret_cast<uint16_t*>(visit[0]) : nullptr, visit[1], visit[2], host.max_exp_avg_sq ? visit[3] : nullptr,
                    weight, n, row.scalars, nonfinite_of(upload.row), row.skip}});
  EventPtr updated = device_->record(Lane::STREAM_UPDATE);
  device_->wait(Lane::STREAM_OUT, updated);
  EventPtr out_begin = record(Lane::STREAM_OUT);
  for (int a = 0; a < 4; ++a) {
    const auto& [home, size] = arrays[a];
    if (home) device_->copy(Lane::STREAM_OUT, offset(home, chunk.begin * size), visit[a], n * size);
  }
  if (sends_weight) device_->copy(Lane::STREAM_OUT, offset(host.master, chunk.begin * width), weight, n * width);
  EventPtr out = device_->record(Lane::STREAM_OUT);

  lock.lock();
  upload.slot->stored = out;
  if (recording) {
    lane_records_.push_back({6, upload.row, upload.chunk, in_begin, in});
    lane_records_.push_back({2, upload.row, upload.chunk, update_begin, updated});
    lane_records_.push_back({7, upload.row, upload.chunk, out_begin, out});
  }
  give_weight(row, updated);
  finish_.streamed_us = device_->now_us() - commit_us_;
  if (++row.issued == chunks) {
    row.stored = out;
    issued_cv_.notify_all();
  }
  return {in, bytes, nullptr};
}

}  // namespace hytrain_fx
