// Threads of a GPU as fibers of one OS thread: each runs until it waits for others, or ends; who runs next is up to the machine that
// derives from Fibers. A fault in a thread ends its launch with a message. Included by one file of each library.
#pragma once
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

namespace fibers {
namespace {
/// Threads of a warp, or of a SIMD-group.
constexpr uint32_t LANES = 32;

/// Over when (*word & mask) is another value, and where there is no word.
struct Wait {
    const uint32_t* word;
    uint32_t mask, value;
    bool over() const { return !word || (*word & mask) != value; }
};

struct Fiber {
    Wait wait;
    bool started, done;
    jmp_buf resume;
    ucontext_t start;
    bool ready() const { return !done && wait.over(); }
};

struct Fibers;
/// The launch of this OS thread, if there is one. The handler of faults reads it, so it must be there without an allocation. (A library
/// with such a variable takes its thread-local ones from a few hundred bytes that a program has for all of its libraries: no others.)
__attribute__((tls_model("initial-exec"))) thread_local Fibers* here;

/// What a launch needs.
struct Fibers {
    /// The one that runs, or ran last.
    Fiber* current = nullptr;
    /// Why the launch ends early.
    const char* problem = nullptr;
    /// Whether a fiber runs: only then is a fault ours.
    volatile bool running = false;
    jmp_buf scheduler;
    ~Fibers() {
        if (here == this) here = nullptr;
    }
};

/// What came back through the scheduler's jump.
enum Reason { SUSPENDED = 1, FAILED = 2 };

/// Ends the launch, from within a fiber.
[[noreturn]] void fail(const char* problem) {
    here->problem = problem;
    _longjmp(here->scheduler, FAILED);
}

/// Lets others run.
void suspend() {
    if (_setjmp(here->current->resume) == 0) _longjmp(here->scheduler, SUSPENDED);
}

void wait_for(const Wait& wait) {
    Fiber* me = here->current;
    me->wait = wait;
    if (!wait.over()) suspend();
    me->wait.word = nullptr;
}

/// Runs a fiber until it waits or ends; false: the launch does. (Never inlined, since it calls setjmp: so its callers' variables are
/// safe.)
__attribute__((noinline)) bool resume(Fiber& fiber) {
    const int reason = _setjmp(here->scheduler);
    if (reason != 0) {
        here->running = false;
        return reason == SUSPENDED;
    }
    here->current = &fiber;
    here->running = true;
    if (fiber.started) _longjmp(fiber.resume, 1);
    fiber.started = true;
    setcontext(&fiber.start);
    return false;
}

/// Makes a fiber anew, which will run `body` on this stack. It must end with `suspend`.
void make(Fiber& fiber, void* stack, size_t bytes, void (*body)()) {
    fiber.started = fiber.done = false;
    fiber.wait.word = nullptr;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = stack;
    fiber.start.uc_stack.ss_size = bytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, body, 0);
}

/// Addresses of which those that are never touched cost nothing; null: there are none.
unsigned char* reserve(size_t bytes, int protection) {
    void* all = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return all == MAP_FAILED ? nullptr : static_cast<unsigned char*>(all);
}

/// A place where threads wait for each other.
struct Meeting {
    uint32_t generation, arrived;
    /// Ends it if all have come; whether they have.
    bool complete(uint32_t threads) {
        if (arrived < threads) return false;
        arrived = 0;
        generation++;
        return true;
    }
    bool arrive(uint32_t threads) {
        arrived++;
        return complete(threads);
    }
    /// For those that arrive from now on.
    Wait end() const { return {&generation, ~0u, generation}; }
};

/// Where the lanes of a warp meet, and bring something of at most SLOT bytes.
template <size_t SLOT> struct Exchange {
    Meeting meeting;
    uint32_t purpose;
    // Two, so that a lane may come to the next meeting before the others have read this one.
    unsigned char slots[2][LANES * SLOT];

    /// Waits for all lanes, which must come for the same purpose (else `mixed`). What they brought, SLOT bytes apart, until the next
    /// meeting; the last to come applies `combine` to it, if there is one.
    const unsigned char* meet(uint32_t lane, uint32_t why, const void* mine, size_t bytes, const char* mixed,
                              void (*combine)(unsigned char*) = nullptr) {
        if (meeting.arrived == 0) purpose = why;
        else if (purpose != why) fail(mixed);
        unsigned char* all = slots[meeting.generation % 2];
        memcpy(all + lane * SLOT, mine, bytes);
        const Wait end = meeting.end();
        if (!meeting.arrive(LANES)) wait_for(end);
        else if (combine) combine(all);
        return all;
    }
};

/// What goes by chance, from a seed.
struct Chance {
    uint64_t state;
    Chance(uint64_t seed = 0) : state(seed * 0x9e3779b97f4a7c15ull | 1) {}
    /// Below n.
    uint32_t operator()(uint32_t n) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return static_cast<uint32_t>(state >> 32) % n;
    }
    template <class T> void shuffle(T& list) {
        for (size_t i = list.size(); i > 1; i--) {
            auto& other = list[(*this)(static_cast<uint32_t>(i))];
            const auto last = list[i - 1];
            list[i - 1] = other;
            other = last;
        }
    }
};

/// What a launch's timer raises.
constexpr int TOO_LONG = SIGVTALRM;
constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, TOO_LONG};
struct sigaction before_us[NSIG];

/// A fault in a fiber ends its launch; any other goes to whoever was there before: other libraries with fibers, which run on other OS
/// threads, and in the end the program's own handler.
void on_fault(int number, siginfo_t* info, void* context) {
    if (here && here->running) {
        if (number == TOO_LONG) fail("threads go on without end");
        fail(number == SIGILL || number == SIGTRAP ? "undefined behaviour: an index, a shift or an alignment"
                                                   : "an access outside of its memory");
    } else if (before_us[number].sa_flags & SA_SIGINFO) {
        before_us[number].sa_sigaction(number, info, context);
    } else if (number != TOO_LONG) {
        signal(number, SIG_DFL);
    }
}

/// Before the first launch. Once a library: handlers that took turns would find that the fault is not theirs.
void catch_faults() {
    static const bool caught = [] {
        struct sigaction action = {};
        action.sa_sigaction = on_fault;
        // The handler jumps away, so the signal must not stay blocked.
        action.sa_flags = SA_SIGINFO | SA_NODEFER;
        for (int number : FAULTS) sigaction(number, &action, &before_us[number]);
        return true;
    }();
    (void)caught;
}

/// Ends the launch of this OS thread when it has taken so many seconds of the processor.
class Timer {
    timer_t timer;

public:
    explicit Timer(int seconds) {
        struct sigevent event = {};
        event.sigev_notify = SIGEV_THREAD_ID;
        event._sigev_un._tid = gettid();
        event.sigev_signo = TOO_LONG;
        timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer);
        // Again if it was the scheduler that it met.
        const struct itimerspec when = {{0, 10000000}, {seconds, 0}};
        timer_settime(timer, 0, &when, nullptr);
    }
    ~Timer() { timer_delete(timer); }
};
}  // namespace
}  // namespace fibers
