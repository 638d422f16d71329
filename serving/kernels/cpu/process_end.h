// Whether a process is ending: the kernel says so before it frees the memory, and only then signals a pidfd. Of one
// that is killed it says so at once, before a core runs it again.
#pragma once

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

namespace {

constexpr unsigned EXITING = 0x4;         // PF_EXITING of the kernel's task flags
constexpr unsigned KILLED = 1u << (9 - 1);  // SIGKILL among the pending signals of a thread

// True when the main thread of `pid` is killed, exits or has exited. False for -1, and where the system does not tell.
inline bool is_ending(int32_t pid) {
    if (pid < 0) return false;
    char path[32], told[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    const ssize_t count = read(file, told, sizeof told - 1);
    close(file);
    told[count > 0 ? count : 0] = 0;
    const char* name_end = strrchr(told, ')');  // a name may have any other character
    unsigned flags = 0, pending = 0;
    const int found = !name_end ? 0 : sscanf(name_end + 1,
        " %*c %*d %*d %*d %*d %*d %u"                                             // state to flags
        " %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %*u %*u %*d"            // faults to resident pages
        " %*u %*u %*u %*u %*u %*u %u",                                            // addresses, then signals
        &flags, &pending);
    return (found >= 1 && flags & EXITING) || (found == 2 && pending & KILLED);
}

}  // namespace
