// Messages between two ranks of a group: send and recv with tags.
//
// Each ordered pair of ranks has a ring in the segment: a byte stream from one to the other that consists of records. A
// record begins with a Line of 64 bytes: the header, and the data if they fit there. All other data follow, up to a
// whole number of lines; so tensors, which begin on 64 bytes, are copied at full speed (base/copy.h). A small message
// is sent immediately; a large one flows in pieces as its receiver reads. Sender and receiver ring each other's `inbox`
// bell.
//
//   sender                                             receiver, at position `read`
//   1 data; header, in the line at `written`           a line.stamp is for read + kLine (acquire)
//   2 written += what is there   (release)             b copies the header and what is there of the data: all of it if
//   3 line.stamp = its end       (release)               the stamp says so, else up to `written` (acquire)
//   4 further pieces: data; written (release)          c read += these lines (release); rings the sender's inbox
//   5 rings the receiver's inbox
//
// So a small message is one cache line that moves from core to core. A stamp is a position that is combined with a
// random number, the group's own. Positions only grow, so an old stamp is none for a later message at its place; and a
// word of data that happens to lie where the receiver looks is the stamp with a probability of 2^-57.
// The receiver only reads the line: to write to it would take it away from the sender, while the receiver waits.
//
// A large message that lies on the sender's heap goes by reference: only its line goes through the ring, and the
// receiver copies the data from the sender's heap. If the receive's tensor lies on the receiver's heap, the receiver
// says where (RingControl::target), and the sender helps: both claim pieces and copy them, because one core alone waits
// for the memory most of the time. When all pieces are there, the receiver counts the message in RingControl::copied,
// and the sender's part is complete. If the sender has left or the group has failed before that, the data may have
// changed during the copy, so the receiver looks at both after the copy, and then the receive fails. (A sender makes
// either of them visible before it ends its own messages: Channel::leave(), Channel::fail().)
//
// A receive whose tensor lies on this rank's heap is posted in RingControl::posted, if the next message from its source
// can only be for it: it is the oldest receive from there, no older one is from any source, and nothing from there has
// begun to come. A sender that is about to write a large message finds it there, if it fits. It does not have to wait
// for the receiver then: if its data go by reference, it begins to copy pieces; if they are not on its heap, it writes
// them to the tensor, and then the line. The receive stays in its place meanwhile, because nothing else can come.
//
// If the group fails, the sender may still be writing to a tensor on the receiver's heap. So a receive that has failed
// says whether that may be (Message::posted), and its memory must not be used for anything else then.
//
// Every function looks for the group's failure after it has taken the lock, because fail_all() drops messages of which
// a part is in a ring: nothing may be sent or received behind them.
//
// A receive takes the oldest message from its source with its tag. A receive from any source takes the message that
// comes first; of those that have come already, it takes one from the first source after that of the previous such
// receive. Receives that want the same message get it in the order in which they were posted. If no receive wants the
// message at the head of a ring, the message stays there, so nothing is buffered without bound. But if a receive waits
// for a later message with another tag, this rank puts the first one aside in its own memory.
//
// A thread that waits makes progress for all pending messages of this rank. A separate thread, the mover, does so for
// asynchronous messages, when no thread that waits has done so for a while. A user's callbacks may wait for other
// messages and for each other. So a thread that is about to run some sees to it that another one moves what is pending,
// and runs the other callbacks. Collectives do not use this code, so pending receives and collectives never block each
// other.
//
// Thread-safety: all methods. Callbacks run without a lock held, in the thread that completed the message or in one of
// Messages' own.
#pragma once

#include <c10/util/FunctionRef.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <source_location>
#include <thread>
#include <vector>

#include "comm/backends/shm/channel.h"

namespace muster::comm::shm_backend {

inline constexpr uint64_t kPosted = kNotOnHeap - 1;  // as a place: in the tensor of the receive that was posted

struct MessageHeader {
  uint64_t bytes = 0;
  // Of the data in the sender's heap, or kNotOnHeap: the data are in the ring, or kPosted: they are in the tensor of
  // the receive that was posted. Of a receive: of its tensor in this rank's heap, or kNotOnHeap.
  uint64_t place = kNotOnHeap;
  int32_t tag = 0;
  uint8_t dtype = 0;
  // Where it was sent from: an index into RankControl::files and a line, 0 if unknown. Set by Messages.
  uint8_t file = 0;
  uint16_t line = 0;
};

// The first line of a record. The layout of records is a part of the segment's (layout.h).
struct alignas(kRecordLine) RecordLine {
  static constexpr uint64_t kWhole = 1;  // in the stamp: all data of the message were there before it
  static constexpr size_t kData = 32;

  std::atomic<uint64_t> stamp;  // stamp_of() the position behind this line, and perhaps kWhole
  MessageHeader header;
  std::byte data[kData];
};
static_assert(sizeof(RecordLine) == kRecordLine);

struct Message {
  OpKind op = OpKind::kSend;  // kSend or kRecv
  int peer = 0;               // kAnySource is replaced by the source when the message has come
  MessageHeader header;
  std::byte* data = nullptr;
  Deadline deadline = Deadline::never();
  std::source_location site = {};  // where the user called
  // May be empty. Called first with kComplete. If it returns true, it is called again with kCallbacks, and may then
  // wait for other messages; what it returns then does not matter.
  enum class Call : uint8_t { kComplete, kCallbacks };
  std::function<bool(const Message&, Call)> on_complete;

  bool posted = false;  // a receive: its source was told where its tensor is, and may write to it

  // Only Messages uses the rest.
  bool submitted = false;  // nobody may wait for it
  bool begun = false;      // a send whose header is in the ring
  uint64_t moved = 0;      // bytes of the data of a send that are in the ring, or in the posted receive's tensor
  uint64_t number = 0;  // by reference, once its header is in the ring: 1 for the first such message to that peer, …
  uint64_t helped = 0;  // by reference: pieces that the sender has copied
  uint64_t target = kNotOnHeap;  // of a send: the tensor's place in the receiver's heap, if it is known
  std::atomic<bool> complete{false};
  std::exception_ptr error;
};

class Messages {
 public:
  // `owner` returns what keeps this object alive (its memory, at least). The thread holds it, because a callback may
  // release the last other reference to the owner.
  explicit Messages(
      Channel& channel, std::function<std::shared_ptr<void>()> owner = [] { return nullptr; });
  ~Messages();

  void run(const std::shared_ptr<Message>& message);  // returns when complete; throws its error
  // The same for a message of at most kSmall bytes, if nothing is in its way, without a Message: send_now() needs room
  // in the ring for all of it; receive_now() needs the wanted message to begin soon, and no other receive that could
  // want it. If they return false, they have done nothing. If a message begins but does not go on soon, receive_now()
  // calls before_wait() and waits for the rest like run(), for `timeout` at most.
  static constexpr uint64_t kSmall = uint64_t{64} << 10;
  // ends() is called at the end, with the lock.
  using Told = c10::function_ref<void()>;
  bool send_now(
      int peer, MessageHeader header, const std::byte* data, const std::source_location& site = {}, Told ends = [] {});
  bool receive_now(
      int peer, const MessageHeader& wanted, std::byte* data, std::chrono::nanoseconds timeout,
      const std::source_location& site = {}, Told before_wait = [] {}, Told ends = [] {});
  void submit(const std::shared_ptr<Message>& message);
  // Returns when the message, which was submitted, is complete. `peer`: its own before that.
  void move_until(Message& message, int peer);

  // The first source, in the order first, first + 1, …, from which a receive with this tag, posted now, would get a
  // message that is here or has begun to come; kAnySource if there is none. Throws the group's failure.
  int find(int tag, int first);
  // If find() finds a message for this receive from any source, submits the receive and returns the source. If it
  // returns kAnySource, it has done nothing.
  int submit_if_here(const std::shared_ptr<Message>& receive, int first);
  bool all_left() const;  // whether all other ranks have left

  // Fails pending messages (the channel must have failed or be stopping) and joins the threads. In a callback on one of
  // them it does not wait for them; they end soon after their callbacks.
  void stop();

 private:
  // A message that came before its receive.
  struct Aside {
    MessageHeader header;
    std::unique_ptr<std::byte[]> data;
  };
  // The message that is arriving from one source.
  struct Incoming {
    bool begun = false;  // its line has been read
    bool whole = false;  // all its data are in the ring
    MessageHeader header;
    std::byte data[RecordLine::kData];  // if they fit there
    std::shared_ptr<Message> target;    // once matched: the receive that gets the message
    Aside* aside = nullptr;             // if put aside
    uint64_t data_bytes = 0;            // that have been copied

    bool by_reference() const { return header.place < kPosted; }
    bool in_line() const { return header.place == kNotOnHeap && header.bytes <= sizeof data; }
    bool in_place() const { return header.place == kPosted; }
  };
  // A thread that waits for a message, and moves all.
  struct Awaiting {
    explicit Awaiting(Messages& messages) : of(messages) { ++of.awaiting_; }
    Awaiting(const Awaiting&) = delete;
    Awaiting& operator=(const Awaiting&) = delete;
    ~Awaiting() {
      ++of.awaited_;
      --of.awaiting_;
      if (!of.defers_) return;
      const std::lock_guard lock(of.mutex_);
      of.work_.notify_all();
    }
    Messages& of;
  };
  using Completed = std::vector<std::shared_ptr<Message>>;

  // A ring as one of its two ends sees it. Its size is a power of two.
  struct Ring {
    Ring(Channel& channel, int from, int to);
    uint64_t stamp_of(uint64_t end) const { return end ^ key; }
    std::byte* at(uint64_t position) const { return data + (position & (size - 1)); }
    RecordLine& line(uint64_t position) const { return *reinterpret_cast<RecordLine*>(at(position)); }
    uint64_t read() const { return control.read.load(std::memory_order_relaxed); }        // at the receiver's end
    uint64_t written() const { return control.written.load(std::memory_order_relaxed); }  // at the sender's end
    void write_data(uint64_t position, const std::byte* from, size_t bytes) const;
    void read_data(uint64_t position, std::byte* to, size_t bytes, size_t whole) const;
    bool has_line() const {  // at the receiver's end: whether there is a line at the read position
      const uint64_t position = read(), stamp = line(position).stamp.load(std::memory_order_acquire);
      return (stamp & ~RecordLine::kWhole) == stamp_of(position + kRecordLine);
    }
    // At the receiver's end: whether all has been read. The acquire lets the receiver see all that a peer sent before
    // the peer was seen to have left.
    bool drained() const { return control.written.load(std::memory_order_acquire) == read(); }

    RingControl& control;
    std::byte* data;
    uint64_t size, key;
  };

  void post(const std::shared_ptr<Message>& message);
  // How a wait for `peer` begins, before it sleeps (spin.h). Returns whether the condition came to hold. Ends early if
  // the peer runs on this rank's core: it cannot go on before this rank sleeps.
  template <typename Condition>
  bool look(int peer, Condition condition) const;
  // Moves all that can be moved; returns whether anything was. Looks for the group's failure; before a sleep, and now
  // and then, also for deadlines and for peers that have left.
  bool progress(bool before_sleep = false);
  bool move(Completed& completed, bool before_sleep = false);  // the same without report()
  bool push(int peer, Completed& completed);
  // Puts the header of a message into the ring, with all of its data if there is room and they are few. Returns false
  // if there is no room for a line.
  bool begin(int peer, const MessageHeader& header, const std::byte* data, bool& whole);
  void put_piece(int peer, const std::byte* data, uint64_t bytes);
  uint64_t room(int peer, uint64_t wanted);      // in the ring to a peer; exact if it is less than `wanted`
  bool is_copied(const Message& message) const;  // by reference, and the receiver has the data
  // Of the receive that the peer has posted for this message, in its heap; kNotOnHeap if it has none.
  uint64_t posted_place(int peer, const MessageHeader& header) const;
  uint64_t write_to_posted(Message& message);  // a turn; returns how many bytes
  // Posts the oldest receive from `peer`, or from each rank (kAnySource), if it can be.
  void post_receive(int peer);
  // Copies what the line at `position` says, where has_line() has seen one. A peer that is defective may change it.
  void look_at_line(int peer, Incoming& in, uint64_t position) const {
    const RecordLine& line = in_[static_cast<size_t>(peer)].line(position);
    in.begun = true;
    in.whole = (line.stamp.load(std::memory_order_relaxed) & RecordLine::kWhole) != 0;
    in.header = line.header;
    if (in.in_line()) std::memcpy(in.data, line.data, sizeof in.data);
  }
  bool take_line(int peer, const Incoming& in, uint64_t& position);
  bool match(int peer, Incoming& in, const int* sought);
  bool copy_reference(int peer, Incoming& in, std::byte* to);
  void say_target(int peer, const Incoming& in);
  uint64_t help(Message& message);  // of a send by reference: copies a piece; returns how many bytes
  bool copy_from_ring(int peer, Incoming& in, std::byte* to, uint64_t& position);
  void deliver(int peer, Incoming& in, Completed& completed);
  // If `sought` is given, a message with this tag that no receive wants stays where it is.
  bool pull(int peer, Completed& completed, const int* sought = nullptr);
  int find_here(int tag, int first, Completed& completed);  // with the lock
  void work_on(const std::shared_ptr<Message>& message);
  bool put_aside(int peer);
  bool match_aside(const std::shared_ptr<Message>& receive, Completed& completed);
  bool match_aside_of(int peer, const std::shared_ptr<Message>& receive, Completed& completed);
  // Removes the first receive that wants a message from `peer` with `tag` from the list and returns it; or null.
  std::shared_ptr<Message> take_receive(int peer, int tag);
  void add_wanted(int peer, int change) { (peer == kAnySource ? wanted_of_any_ : wanted_[peer]) += change; }
  void finish(const std::shared_ptr<Message>& message, Completed& completed, std::exception_ptr error = nullptr);
  void note_site(MessageHeader& header, const std::source_location& site);  // with the lock
  std::string site_of(int peer, const MessageHeader& header) const;         // "train.cpp:17"; "" if unknown
  bool fits(const Message& receive, int peer, const MessageHeader& header);
  void report(const Completed& completed);
  Completed tell(const Completed& completed);
  Completed move_some();
  void run_callbacks(Completed messages,
                     std::unique_lock<std::mutex>& lock);  // with the lock, and releases it meanwhile
  void let_work();                                         // with the lock
  std::shared_ptr<Message> take_callbacks();               // with the lock; null if there are none
  void fail_all(Completed& completed, std::exception_ptr error);
  void check_peers();
  void check_receives_of_any();
  bool receiving(int peer) const {
    return wanted_[peer] + wanted_of_any_ > 0 || incoming_[peer].target || incoming_[peer].aside;
  }
  bool pending() const;  // with the lock
  bool nothing_pending();
  // Whether a thread that waits for a message moves all of them: it is not in a callback.
  bool somebody_moves() const { return awaiting_.load() > in_callbacks_.load(); }
  // Whether something may be pending that no thread which waits will move. With the lock.
  bool needs_mover() const { return submitted_ > 0 || (pending() && !somebody_moves()); }
  bool await_lull(std::unique_lock<std::mutex>& lock);
  void sleep_until_moved(const Message& message);
  void work();
  int shown(int rank) const { return channel_.shown(rank); }
  Channel& channel_;
  const std::function<std::shared_ptr<void>()> owner_;
  std::vector<Ring> in_, out_;  // by peer
  std::mutex mutex_;
  std::vector<std::deque<std::shared_ptr<Message>>> sends_;  // by destination
  std::list<std::shared_ptr<Message>> receives_;             // in the order posted
  std::vector<int> wanted_;                                  // how many receives there are from each source
  int wanted_of_any_ = 0;
  int first_ = 0;                     // where the next round over the sources begins
  std::vector<uint64_t> referenced_;  // by destination: messages by reference whose headers are in the ring
  std::vector<uint64_t> read_seen_;   // by destination: RingControl::read, when this rank last looked at it
  std::vector<Incoming> incoming_;
  std::vector<std::list<Aside>> aside_;
  std::vector<const char*> files_;  // the files whose names are in this rank's RankControl::files, from 1 on
  std::condition_variable work_;
  Clock::time_point next_check_;
  bool stop_ = false;
  std::vector<std::thread> threads_;                // one of them may be the mover; others are idle or in callbacks
  std::deque<std::shared_ptr<Message>> callbacks_;  // messages whose callbacks wait for a thread
  int idle_ = 0;                                    // how many of the threads are
  bool moving_ = false;                             // there is a mover
  int submitted_ = 0;                               // how many submitted messages are not complete
  std::atomic<bool> defers_{false};                 // it sleeps because a thread that waits moves messages
  std::atomic<int> awaiting_{0}, in_callbacks_{0};  // threads that are in move_until(), and in users' callbacks
  std::atomic<uint64_t> awaited_{0};                // how many move_until() have ended
};

}  // namespace muster::comm::shm_backend
