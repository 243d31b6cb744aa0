"""The native core: each needs a rebuild, so there are few."""

from __future__ import annotations

from mutants.mutant import NATIVE, Mutant

MUTANTS = (
    Mutant(
        "native-guard-missing",
        "csrc/src/host_pages.cpp",
        "const int access = vacancy == Vacancy::guard ? PROT_READ | PROT_WRITE : PROT_NONE;",
        "const int access = vacancy == Vacancy::guard ? PROT_NONE : PROT_NONE;",
        "a late read at a sleeping engine kills it (P4)",
        NATIVE + "region_guarded_reads_zeros_while_asleep",
        crash=True,
    ),
    Mutant(
        "native-mapped-while-created",
        "csrc/src/region.cpp",
        "  }\n  return staged;\n",
        "    staged.back()->map(true);\n  }\n  return staged;\n",
        "out of memory half way leaves mappings (M5)",
        NATIVE + "fault_map_creates_everything_before_it_maps_anything",
        also=(("  for (auto &residence : staged) residence->map(true);\n", ""),),
    ),
    Mutant(
        "native-condemned-not-retried",
        "csrc/src/region.cpp",
        "        region->space.retry_condemned();\n      } catch (...) {\n        unreleased",
        "        (void)region;\n      } catch (...) {\n        unreleased",
        "memory that the driver refused to release once is never asked for again (M12)",
        NATIVE + "fault_release_condemns",
    ),
    Mutant(
        "native-mapped-over-a-stuck-mapping",
        "csrc/src/region.cpp",
        "    if (region.space.blocked()) throw;\n",
        "    if (region.space.blocked()) return;\n",
        "new memory under a mapping that a later retry takes away (M12)",
        NATIVE + "fault_undo_that_fails_condemns",
    ),
    Mutant(
        "native-failed-map-leaves-its-mapping",
        "csrc/src/handles.cpp",
        "    if (mapped_ > 0) unmap();\n    release();\n",
        "    release();\n",
        "a wake that failed leaves pages mapped that nobody counts (M12)",
        NATIVE + "fault_TP_OP_SET_ACCESS",
    ),
    Mutant(
        "native-copy-from-a-sleeping-region",
        "csrc/src/access.cpp",
        "if (!entry.open_ || !entry.usable(shared)) throw",
        "if (!entry.usable(shared)) throw",
        "a copy reads what is not there",
        NATIVE + "copy_from_a_region_that_sleeps_is_an_error",
        crash=True,
    ),
    Mutant(
        "native-last-extent-too-long",
        "csrc/src/region.cpp",
        "  sizes.back() = region.space.range().bytes - (sizes.size() - 1) * region.extent_bytes;\n",
        "",
        "the last extent is mapped over the end of its range",
        NATIVE + "region_sizes_are_rounded_up_and_the_last_extent_may_be_short",
        crash=True,
    ),
    Mutant(
        "native-arena-gives-back-its-neighbours",
        "csrc/src/arena.cpp",
        "const Address start = (asked.address + page - 1) / page * page, end = asked.end() / page * page;",
        "const Address start = asked.address / page * page, end = (asked.end() + page - 1) / page * page;",
        "dropping one image damages the next",
        NATIVE + "arena_commits_pages_and_gives_them_back",
        crash=True,
    ),
    Mutant(
        "native-hash-without-its-place",
        "csrc/src/hash.cpp",
        "uint64_t x = word ^ (kK + index * kG);",
        "uint64_t x = word ^ (kK + 0 * index * kG);",
        "chunks whose words changed places look clean (M7)",
        NATIVE + "hash_is_its_definition_at_every_length",
    ),
)
