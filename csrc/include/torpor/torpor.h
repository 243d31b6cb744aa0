/* torpor's native core: regions of device memory whose physical pages can go and come back under fixed addresses.
 *
 * Plain C. Handles are opaque and owned by the caller; every function that can fail returns a tp_status and, where `err` is not
 * NULL, fills it. Nothing here exits, throws across the boundary, prints, or keeps a pointer to the caller's memory after it
 * returns. All functions may be called from any thread; one device serialises its structural calls (create, map, unmap, destroy),
 * copies and hashes run beside each other. Sizes and addresses are bytes.
 */
#ifndef TORPOR_TORPOR_H
#define TORPOR_TORPOR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TP_ABI_VERSION 6

typedef enum tp_status {
  TP_OK = 0,
  TP_INVALID = 1,       /* an argument is wrong: the caller's bug */
  TP_STATE = 2,         /* the object is not in a state for this call */
  TP_DEVICE_MEMORY = 3, /* not enough device memory; bytes_needed, bytes_free */
  TP_HOST_MEMORY = 4,   /* not enough host memory for an arena; bytes_needed, bytes_free */
  TP_DRIVER = 5,        /* a driver call failed; op and code */
  TP_UNSUPPORTED = 6,   /* this driver or machine cannot do it */
  TP_INTERNAL = 7       /* our bug */
} tp_status;

typedef enum tp_op { /* driver calls, the points where faults can be injected */
  TP_OP_RESERVE = 0,
  TP_OP_FREE_ADDRESS = 1,
  TP_OP_CREATE = 2,
  TP_OP_RELEASE = 3,
  TP_OP_MAP = 4,
  TP_OP_SET_ACCESS = 5,
  TP_OP_UNMAP = 6,
  TP_OP_EXPORT = 7,
  TP_OP_IMPORT = 8,
  TP_OP_COPY = 9,
  TP_OP_HASH = 10,
  TP_OP_COMMIT = 11, /* host memory of an arena */
  TP_OP_COUNT = 12
} tp_op;

typedef struct tp_error {
  int32_t status; /* tp_status */
  int32_t op;     /* tp_op, or -1 */
  int64_t code;   /* the driver's own code: an errno on `host`, a CUresult on `cuda` */
  uint64_t bytes_needed;
  uint64_t bytes_free;
  char message[256];
} tp_error;

typedef struct tp_device tp_device;
typedef struct tp_region tp_region;
typedef struct tp_import tp_import;
typedef struct tp_arena tp_arena;

int32_t tp_abi_version(void);

/* ---- devices ------------------------------------------------------------------------------------------------------------ */
#define TP_DEVICE_FAULTS 1u /* wrap the driver in the fault-injecting one */

/* driver: "host" or "cuda". TP_UNSUPPORTED (with the reason) where the driver cannot be loaded. */
tp_status tp_device_open(const char *driver, int32_t ordinal, uint32_t flags, tp_device **out, tp_error *err);
/* Fails with TP_STATE while regions, imports or arenas of it live. Where those are only memory of torch that was given over by
 * tp_torch_disown, it succeeds, and the device goes with the last of it. */
tp_status tp_device_close(tp_device *device, tp_error *err);
/* Blocks until everything that this process has asked of the device is done (`host`: nothing to wait for). */
tp_status tp_device_synchronize(tp_device *device, tp_error *err);

typedef struct tp_device_stats {
  uint64_t granularity;   /* smallest extent */
  uint64_t live_regions, live_extents, live_imports, live_arenas;
  uint64_t reserved_bytes; /* address space of regions and imports */
  uint64_t mapped_bytes;   /* physical memory mapped in regions */
  uint64_t condemned_bytes;/* unmapped, but the driver refused to release it; the next unmap of the region retries */
  uint64_t imported_bytes;
  uint64_t committed_bytes;/* host memory of arenas */
  uint64_t spare_bytes;    /* host memory that arenas have taken ahead, and nobody has committed */
} tp_device_stats;
tp_status tp_device_get_stats(tp_device *device, tp_device_stats *out, tp_error *err);
/* What the driver says is free, to anybody, now: neighbours change it at any time, and what was released a moment ago may be missing. */
tp_status tp_device_free_bytes(tp_device *device, uint64_t *bytes, tp_error *err);

/* Faults: the nth call of op from now on (1 is the next) fails with TP_DRIVER, or with TP_DEVICE_MEMORY for CREATE and
 * TP_HOST_MEMORY for COMMIT, and so do the count-1 calls after it. TP_UNSUPPORTED without TP_DEVICE_FAULTS. */
tp_status tp_fault_arm(tp_device *device, tp_op op, uint64_t nth, uint64_t count, tp_error *err);
tp_status tp_fault_clear(tp_device *device, tp_error *err);
tp_status tp_fault_calls(tp_device *device, tp_op op, uint64_t *calls, tp_error *err); /* calls seen since open */

/* ---- regions ------------------------------------------------------------------------------------------------------------ */
#define TP_REGION_EXPORTABLE 1u /* its extents can be exported as file descriptors */
#define TP_REGION_GUARDED 2u    /* P4: while asleep the range is zero pages (reads give zeros, writes go nowhere), never a hole.
                                   `cuda` has no such pages: there an access faults */

/* Reserves and maps. bytes and extent_bytes are rounded up to the granularity; the last extent may be shorter. On failure nothing
 * is left. */
tp_status tp_region_create(tp_device *device, uint64_t bytes, uint64_t extent_bytes, uint32_t flags, const char *name,
                           tp_region **out, tp_error *err);
/* Unmaps if mapped, releases, frees the addresses. After a failure the region is still there and the call can be retried. */
tp_status tp_region_destroy(tp_region *region, tp_error *err);

typedef struct tp_region_stats {
  uint64_t address, bytes, extent_bytes;
  uint64_t extents; /* how many it has when mapped */
  int32_t mapped;   /* 1: every extent is mapped. 0: none is. There is no third state. */
  uint64_t condemned_bytes;
} tp_region_stats;
tp_status tp_region_get_stats(tp_region *region, tp_region_stats *out, tp_error *err);

/* Takes the physical memory of n regions away. Regions already unmapped are passed over (their condemned extents are retried).
 * *done counts the regions that are unmapped when the call returns; after a failure the rest are still mapped and whole. */
tp_status tp_regions_unmap(tp_region *const *regions, uint64_t n, uint64_t *done, tp_error *err);
/* Creates everything for all n regions before it maps any (M5); after a failure none of them has changed. Content is undefined
 * (zeros on `host`). Regions already mapped are passed over. */
tp_status tp_regions_map(tp_region *const *regions, uint64_t n, tp_error *err);

#define TP_EXTENT_RDMA 1u /* a network card can be given access to it */

typedef struct tp_extent {
  uint64_t bytes;
  uint64_t device_id, inode; /* `host`: st_dev and st_ino of the memfd, which /proc shows; 0 on `cuda` */
  uint64_t flags;            /* TP_EXTENT_ */
} tp_extent;
/* Fills at most cap; *n is how many there are (0 while asleep). */
tp_status tp_region_extents(tp_region *region, tp_extent *out, uint64_t cap, uint64_t *n, tp_error *err);
/* New file descriptors (close-on-exec), the caller closes them. TP_STATE while asleep. */
tp_status tp_region_export(tp_region *region, int32_t *fds, uint64_t cap, uint64_t *n, tp_error *err);

/* Maps extents exported by another process one after another into one range. The descriptors stay the caller's. */
tp_status tp_import_open(tp_device *device, const int32_t *fds, const uint64_t *sizes, uint64_t n, int32_t writable,
                         tp_import **out, uint64_t *address, tp_error *err);
tp_status tp_import_close(tp_import *import_, tp_error *err);

/* ---- copies and hashes --------------------------------------------------------------------------------------------------- */
typedef enum tp_copy_kind { TP_COPY_TO_HOST = 0, TP_COPY_TO_DEVICE = 1, TP_COPY_DEVICE = 2 } tp_copy_kind;
typedef struct tp_span {
  uint64_t dst, src, bytes;
} tp_span;
/* Blocks until every span is copied. threads: how many copy at once (0: one). `cuda` uses several streams, which wait for nobody: the
 * caller's own work on that memory must have ended. TP_STATE, with nothing copied, when a span touches memory of this device that is
 * asleep or not committed; unmap and its like wait for copies and hashes in progress. A copy that fails may have copied a part. */
tp_status tp_copy(tp_device *device, tp_copy_kind kind, const tp_span *spans, uint64_t n, uint32_t threads, tp_error *err);
/* In every one of `arrays` arrays, dst[dst_ids[i]] = src[src_ids[i]] for blocks of block_bytes. */
typedef struct tp_blocks {
  const uint64_t *dst, *src; /* the address of block 0 of every array */
  uint64_t arrays, block_bytes;
  const uint64_t *dst_ids, *src_ids;
  uint64_t count;
  uint64_t dst_limit, src_limit; /* ids are below: TP_INVALID, with nothing copied, where one is not */
} tp_blocks;
typedef struct tp_block_copy tp_block_copy;
/* Otherwise like tp_copy, but only begun: `cuda` is asked and not waited for (but where lists are very long), `host` has copied when it
 * returns. The lists are the caller's again at once; the memory is not, until the handle has ended. */
tp_status tp_block_copy_begin(tp_device *device, const tp_blocks *blocks, uint32_t threads, tp_block_copy **out, tp_error *err);
/* Once, from any thread: blocks until all is copied, or never will be, and frees the handle whatever comes out. */
tp_status tp_block_copy_end(tp_block_copy *copy, tp_error *err);
/* One 64-bit hash per chunk of chunk_bytes (the last may be shorter) of memory that lies where `on_host` says. The same bytes
 * have the same hash on every driver and on the host. chunk_bytes: a multiple of 8. Not cryptographic; defined in src/hash.h. */
tp_status tp_hash(tp_device *device, uint64_t address, uint64_t bytes, uint64_t chunk_bytes, int32_t on_host, uint64_t *out,
                  uint32_t threads, tp_error *err);

/* How chunk hashes of device memory are computed, for people: "processor", "kernel on the device", or "staged through host memory: "
 * and why (then a hash runs at the speed of the link). Zero-terminated, cut at `cap`. May compile the kernels, which takes a second. */
tp_status tp_hash_path(tp_device *device, char *out, uint64_t cap, tp_error *err);

/* `bytes` at `device_address` and their image at `host_address`, in chunks; chunk i counts where wanted[i] is not 0. */
typedef struct tp_image {
  uint64_t device_address, host_address, bytes;
  const uint8_t *wanted;
  uint8_t *valid;        /* tp_save only, as the next two */
  const uint64_t *known;
  uint64_t *source;
  uint64_t *checked;
} tp_image;
/* Both block until done and otherwise behave like tp_copy and tp_hash.
 *
 * tp_save: waits for what this process has in flight on the device. source[i] becomes the chunk's hash. A chunk may be passed over
 * where valid[i] is not 0 and known[i] is its hash. Else valid[i] becomes 0, the chunk is copied to the image, and checked[i] is the
 * hash of what is read there afterwards; valid[i] stays 0, also after a failure. On `host`, source[i] is then the hash of the very
 * bytes that were copied. */
tp_status tp_save(tp_device *device, const tp_image *images, uint64_t n, uint64_t chunk_bytes, uint32_t threads, tp_error *err);
/* Copies the images' chunks to the device; checked[i] is the hash of what is read there afterwards. */
tp_status tp_restore(tp_device *device, const tp_image *images, uint64_t n, uint64_t chunk_bytes, uint32_t threads, tp_error *err);
/* tp_regions_map and tp_restore in one. On `cuda` both go on at once: what has memory is copied to while the rest gets it, in the order
 * of the regions. `mapped`, where it is given, is called once, on the caller's thread, when all regions are mapped and all copies have
 * been started; they go on meanwhile. A failure to create or map leaves every region as it was, and `mapped` uncalled; after another
 * failure they may be mapped, and their content is undefined: tp_regions_unmap them. */
typedef void (*tp_mapped)(void *context);
tp_status tp_wake(tp_device *device, tp_region *const *regions, uint64_t n, const tp_image *images, uint64_t m, uint64_t chunk_bytes,
                  uint32_t threads, tp_mapped mapped, void *context, tp_error *err);

/* ---- host arenas --------------------------------------------------------------------------------------------------------- */
/* Address space for host images; costs no memory until committed. */
tp_status tp_arena_create(tp_device *device, uint64_t bytes, tp_arena **out, uint64_t *address, tp_error *err);
tp_status tp_arena_destroy(tp_arena *arena, tp_error *err);
/* Backs the whole pages around [offset, offset + bytes) with memory, page-locked where the driver wants that, huge pages where the kernel gives them.
 * TP_HOST_MEMORY, with nothing changed, when the machine or its cgroup has not enough free. Committed ranges are passed over. */
tp_status tp_arena_commit(tp_arena *arena, uint64_t offset, uint64_t bytes, uint32_t threads, tp_error *err);
/* Takes the memory that tp_arena_commit will be asked for, in parts of part_bytes (whole pages) in the order of addresses, on threads of the
 * arena's own, each filling pages on `threads` threads, and returns at once. It is only a matter of time: what was taken is spare, which no copy may use, until it is
 * committed; a commit waits for the parts of its range that are still to come, and takes itself what is not. After a failure no new part is begun.
 * TP_STATE when the arena does so already; TP_HOST_MEMORY, with nothing begun, when not enough is free for all of it. */
tp_status tp_arena_commit_ahead(tp_arena *arena, uint64_t offset, uint64_t bytes, uint64_t part_bytes, uint32_t threads, tp_error *err);
/* Ends that after the parts that are begun, and gives back what is spare: *unused bytes. Blocks. Does nothing where nothing is taken ahead. */
tp_status tp_arena_end_ahead(tp_arena *arena, uint64_t *unused, tp_error *err);
typedef struct tp_ahead {
  uint64_t asked_bytes, taken_bytes; /* of the last tp_arena_commit_ahead */
  double seconds;                    /* from its begin to the last part that it took */
  int32_t active;                    /* some of it is still to come */
  int32_t failed;
  tp_error failure; /* why it ended early */
} tp_ahead;
tp_status tp_arena_get_ahead(tp_arena *arena, tp_ahead *out, tp_error *err);
/* Gives the memory of the whole pages inside the range back; they read as zeros if they are committed again. */
tp_status tp_arena_decommit(tp_arena *arena, uint64_t offset, uint64_t bytes, tp_error *err);
/* Maps [file_offset, file_offset + bytes) of a memory file over whole pages of the arena: shared with whoever has the file, read-only, page-locked
 * where the driver wants that. What was committed there is given back first. The range counts as committed until it is decommitted; the file's
 * descriptor stays the caller's, and may be closed. TP_INVALID unless the file is a memfd whose content and size are sealed. After another
 * failure the range is not committed. */
tp_status tp_arena_adopt(tp_arena *arena, uint64_t offset, uint64_t bytes, int32_t fd, uint64_t file_offset, uint32_t threads, tp_error *err);
/* Host memory that this process may still take without putting anybody in danger: the machine's, within every memory cgroup around it. */
tp_status tp_host_free_bytes(uint64_t *bytes, tp_error *err);

/* ---- memory for torch ----------------------------------------------------------------------------------------------------- */
/* torch's CUDAPluggableAllocator calls a pair of plain functions. Slot i has the pair tp_torch_alloc_i and tp_torch_free_i (declared
 * in src/torch_bridge.cpp alone: torch finds them by name) and stands for one pool; their memory is regions of its device. They may be
 * called from any thread at any time, never throw, take no lock but the core's own, and never wait for their owner.
 * alloc gives NULL when the mode does not allow it, for a device that is not the slot's, and when there is no memory. */
#define TP_TORCH_SLOTS 32

typedef enum tp_torch_mode {
  TP_TORCH_HELD = 1, /* the owner is at work: alloc works, what is freed keeps its memory */
  TP_TORCH_OPEN = 2, /* alloc works; free waits for the device and gives the physical memory back at once */
  TP_TORCH_SHUT = 3  /* alloc is refused, what is freed keeps its memory */
} tp_torch_mode;

/* A free slot for a pool, TP_TORCH_HELD. ordinal: the device as torch counts. flags: TP_REGION_. TP_STATE when all are taken. */
tp_status tp_torch_open(tp_device *device, int32_t ordinal, uint64_t extent_bytes, uint32_t flags, const char *name, uint32_t *slot,
                        tp_error *err);
/* Returns when no call of torch is under way any more that the mode does not allow. TP_TORCH_OPEN gives back what waited. */
tp_status tp_torch_set_mode(uint32_t slot, tp_torch_mode mode, tp_error *err);
/* What has happened since the last call: regions that torch was given, and addresses of those it has freed, each at most once, a
 * region before its address. Regions stay the slot's until their address was taken: then they are the caller's to destroy, not before
 * a call of tp_torch_set_mode has returned. Call until both counts are less than their caps. */
tp_status tp_torch_take(uint32_t slot, tp_region **born, uint64_t born_cap, uint64_t *born_count, uint64_t *dead, uint64_t dead_cap,
                        uint64_t *dead_count, tp_error *err);
typedef struct tp_torch_refusal {
  uint64_t count; /* how often alloc has given NULL since the slot was opened */
  tp_error last;  /* why it did the last time */
} tp_torch_refusal;
tp_status tp_torch_get_refusal(uint32_t slot, tp_torch_refusal *out, tp_error *err);
/* The owner leaves. Regions that were not taken as dead are the slot's from here on, and are destroyed when torch frees them; alloc is
 * refused. The slot can be opened again when all of them are gone. */
tp_status tp_torch_disown(uint32_t slot, tp_error *err);

#ifdef __cplusplus
}
#endif
#endif
