// Anonymous and shared pages of this process: what the host driver and the arenas of every driver are made of.
#pragma once

#include <cstdint>

#include "driver.h"

namespace torpor::host {

uint64_t page_size() noexcept;
inline constexpr uint64_t kHugePage = uint64_t{2} << 20;

// Address space that costs no memory, PROT_NONE, huge-page aligned where it is large enough to matter, or as asked (whole pages).
// op: what it is for, in errors.
Range reserve(uint64_t bytes, uint64_t alignment = 0, tp_op op = TP_OP_RESERVE);
void free_address(Range range);
// Replaces whatever is mapped in the range in one step: at no time is the range free for another thread's mmap.
void vacate(Range range, Vacancy vacancy);

// Faults every page of a mapped, writable range in, on `threads` threads. Throws the memory error of `op` when the kernel has none.
void populate(Range range, uint32_t threads, tp_op op);
// Anonymous memory, all of it there, in huge pages where the kernel gives them; a forked child does not get it.
Range allocate(uint64_t bytes);
// Moves its pages to `address`, in one step for whoever looks there; the old range stays reserved and empty.
void move_pages(Range from, Address address);
// Is the kernel able to?
bool can_move_pages() noexcept;
// Gives back what `allocate` gave, moved or not.
void release(Range range);

// Does the kernel give huge pages to memory files that ask for them?
bool huge_files();
// Gives every page of a memfd its memory; huge pages come only through a mapping that asks for them.
void populate_file(int fd, uint64_t bytes, bool huge);
// Fills the page tables of a range whose pages exist. Only a matter of speed: never fails.
void prefault(Range range) noexcept;

// The parts of a copy on the host: memcpy on `threads` threads, large spans in pieces.
void copy(const std::vector<tp_span> &spans, uint32_t threads);

// Driver::commit and decommit without page-locking.
void commit(Range range, uint32_t threads);
void decommit(Range range);
// Throws TP_INVALID unless it is a memfd that has so many bytes there, and whose content and size nobody can change.
void require_sealed(const FilePart &file, uint64_t bytes);
// Driver::adopt without page-locking.
void adopt(Range range, const FilePart &file, uint32_t threads);

// How many threads are worth starting to allocate or free so many bytes: at most the cores this process may use.
uint32_t useful_threads(uint64_t bytes) noexcept;

}  // namespace torpor::host
