#include "uploader.h"

#include <algorithm>
#include <tuple>

namespace hytrain_fx {
namespace {

// Bytes on their way to the device at once: enough to keep the link busy, few enough to let an
// urgent layer pass soon.
constexpr int64_t kBytesInFlight = 48 << 20;
constexpr auto kPoll = std::chrono::microseconds(100);

// Whether nobody reads the row's weight any more.
bool may_be_overwritten(const Row& row) { return row.is_armed(Arm::RELOAD) && row.released && row.released->known_done(); }

}  // namespace

void Uploader::run() {
  state_.device->bind_thread();
  EngineLock lock(state_.mutex);
  while (true) {
    state_.upload_cv.wait(lock, [this] {
      return state_.stop || !state_.updated.empty() || !state_.ahead.empty() || !state_.streaming.empty() || tail_.may_be_sent();
    });
    if (state_.stop) return;
    if (!tail_.may_be_sent()) ask_events(lock);
    if (tail_.may_be_sent()) {
      send_rest(lock);
    } else if (!in_flight_.empty() && (bytes_ >= kBytesInFlight || !tail_.has_room(places_))) {
      await_first(lock);
    } else if (const Upload next = next_upload(); next.row < 0) {
      // what is updated is still being read, or no staging slot is free
      state_.upload_cv.wait_for(lock, kPoll);
    } else if (const InFlight sent = send(next, lock); sent.end) {
      in_flight_.push_back(sent);
      bytes_ += sent.bytes;
      places_ += sent.places;
    }
  }
}

void Uploader::await_first(EngineLock& lock) {
  const InFlight first = in_flight_.front();
  in_flight_.pop_front();
  bytes_ -= first.bytes;
  places_ -= first.places;
  lock.unlock();
  first.end->sync();
  lock.lock();
  tail_.all_left_has_come();  // that was before it
}

void Uploader::leave_all() {
  for (const InFlight& copy : in_flight_) tail_.leave({copy.end, copy.bytes, copy.places, false, true, nullptr});
  in_flight_.clear();
  bytes_ = places_ = 0;
}

// Asks for the events that decide what comes next, as far as it goes. Without the lock: the driver
// may take milliseconds, and whoever launches would wait for the lock meanwhile. The choice itself
// is made with the lock, from what is known. An event that a row was given in between counts as not
// come, and is asked for the next time.
void Uploader::ask_events(EngineLock& lock) const {
  enum { kReleased, kOpen, kOpensLast, kStored, kChoices };
  std::array<std::vector<EventPtr>, kChoices> asked;
  // rows that come one after the other often share an event
  auto add = [&asked](int choice, const EventPtr& event) {
    std::vector<EventPtr>& events = asked[choice];
    if (!event->known_done() && (events.empty() || events.back() != event)) events.push_back(event);
    return event->known_done();
  };
  const std::set<Key>& streamed = state_.streaming;
  for (const Key& key : state_.updated.empty() ? state_.ahead : state_.updated) {
    const Row& row = state_.row(key);
    if (row.is_armed(Arm::RELOAD) && row.released && add(kReleased, row.released)) break;
  }
  for (const Key& key : streamed) {
    if (add(kOpen, state_.row(key).open)) break;
  }
  if (const Row* last = state_.waiting > 0 ? state_.opens_last() : nullptr) add(kOpensLast, last->open);  // for may_be_sent()
  for (const StagingSlot& slot : staging_.slots()) {
    if (streamed.empty() || !slot.stored || add(kStored, slot.stored)) break;
  }
  if (std::all_of(asked.begin(), asked.end(), [](const auto& events) { return events.empty(); })) return;
  lock.unlock();
  for (int choice = 0; choice < kChoices; ++choice) {
    for (const EventPtr& event : asked[choice]) {
      if (event->done()) break;  // the first that has come is taken
    }
  }
  lock.lock();
}

Upload Uploader::next_upload() {
  bool ready = false;
  StagingSlot* slot = state_.streaming.empty() ? nullptr : staging_.free_slot();
  const int streamed = slot ? visits_.next(ready) : -1;
  const Key* weight = next_of(state_.updated);
  const bool is_before = weight && ready && std::tie(state_.rows[streamed].spec.unit, streamed) < std::tie(weight->unit, weight->row);
  if (streamed >= 0 && (!weight || is_before)) return {streamed, state_.rows[streamed].streamed.chunks, Load::STATES, slot};
  const Key* ahead = weight ? nullptr : next_of(state_.ahead);
  if (ahead) return {ahead->row, ahead->chunk, Load::AHEAD};
  return weight ? Upload{weight->row, weight->chunk} : Upload{};
}

// The first whose weight nobody reads any more.
const Key* Uploader::next_of(const std::set<Key>& keys) const {
  for (const Key& key : keys) {
    if (may_be_overwritten(state_.row(key))) return &key;
  }
  return nullptr;
}

InFlight Uploader::send(const Upload& upload, EngineLock& lock) {
  InFlight sent = upload.load == Load::STATES ? visits_.send(upload, lock)
                  : upload.load == Load::AHEAD ? send_ahead(upload, lock)
                                               : send_weight(upload, lock);
  sent.places = state_.device->placed(Lane::H2D) - placed_;
  placed_ += sent.places;
  return sent;
}

InFlight Uploader::send_weight(const Upload& upload, EngineLock& lock) {
  Row& row = state_.rows[upload.row];
  Chunk& chunk = row.chunks[upload.chunk];
  state_.updated.erase(row.key(upload.chunk));
  const bool recording = state_.records.on();
  const EventPtr released = row.released;
  lock.unlock();
  sleep_us(state_.provoked.uploader_delay_us);
  if (state_.provoked.copy_fails_in == upload.row) throw std::runtime_error("injected failure in row " + std::to_string(upload.row));
  if (upload.load == Load::FLAGGED) state_.device->wait_flag(Lane::H2D, chunk.flag, chunk.raised);
  // Read until then. Rows that come one after the other often share an event.
  if (!released->known_done() && released != awaited_) state_.device->wait(Lane::H2D, awaited_ = released);
  const InFlight sent = copy_weight(row, upload, recording);
  lock.lock();
  note_copy(upload, sent);
  if (upload.load == Load::WEIGHT) chunk.set_state(ChunkState::SENT);
  updates_.count_sent(row, sent.end, ++state_.issues);
  return sent;
}

// With the lock held: the factors must not come meanwhile. Sends nothing where they have come
// before.
InFlight Uploader::send_ahead(const Upload& upload, EngineLock& lock) {
  lock.unlock();
  sleep_us(state_.provoked.uploader_delay_us);
  lock.lock();
  Row& row = state_.rows[upload.row];
  // It may have been taken out meanwhile, and put there again by a later commit, before which the
  // weight is still read.
  if (!may_be_overwritten(row) || !state_.ahead.erase(row.key(upload.chunk))) return {};
  const InFlight sent = copy_weight(row, upload, state_.records.on());
  note_copy(upload, sent);
  Chunk& chunk = row.chunks[upload.chunk];
  chunk.ahead = sent.end;
  chunk.ahead_issue = ++state_.issues;
  guesses_.count_sent(chunk);
  return sent;
}

InFlight Uploader::copy_weight(const Row& row, const Upload& upload, bool recording) {
  const Chunk& chunk = row.chunks[upload.chunk];
  const int64_t at = chunk.begin * row.weight_bytes(), bytes = chunk.params() * row.copied_bytes();
  EventPtr before = recording ? state_.device->record(Lane::H2D) : nullptr;
  if (bytes > 0) state_.device->copy(Lane::H2D, offset(row.spec.weight, at), offset(row.new_weight(), at), bytes);
  EventPtr end = upload.is_shown ? state_.device->record_shown(Lane::H2D) : state_.device->record(Lane::H2D);
  return {end, bytes, before};
}

void Uploader::note_copy(const Upload& upload, const InFlight& copy) {
  if (copy.begin) state_.records.note_lane(kToDevice, upload.row, upload.chunk, copy.begin, copy.end);
}

// Where streamed rows are in the rest, their states have come when this returns, and all before them.
void Uploader::send_rest(EngineLock& lock) {
  const uint64_t commit = state_.commits;
  const bool has_states = !state_.streaming.empty();
  tail_.set_followed(has_states);
  LaneProgress lane;
  std::vector<Upload> rest = tail_.take(bytes_, staging_.size(), lane);
  leave_all();
  for (Upload& upload : rest) {
    tail_.await_room(lane, commit, lock);
    if (state_.stop || state_.has_failed()) return;
    const Chunk& chunk = state_.rows[upload.row].chunks[upload.chunk];
    const bool is_states = upload.load == Load::STATES, is_flagged = upload.load == Load::FLAGGED;
    state_.clock.sent_at_once(chunk.params(), chunk.is(ChunkState::PROMISED));
    if (is_states) upload.slot = staging_.next_slot();
    const InFlight sent = send(upload, lock);
    lane.add({sent.end, sent.bytes, sent.places, is_states, upload.is_shown, is_flagged ? &chunk : nullptr});
    // Nobody sees hidden copies come before something behind them is shown.
    if (!upload.is_shown && !tail_.has_room(lane.places())) state_.device->show(Lane::H2D);
  }
  if (has_states) tail_.await_states(lane, commit, lock);
  tail_.leave(lane);
}

}  // namespace hytrain_fx
