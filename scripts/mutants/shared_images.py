"""Images that engines share: believed only when right, written by nobody, gone with the last; and loading in steps."""

from __future__ import annotations

from mutants.mutant import Mutant

ARENA = "csrc/src/arena.cpp"
PAGES = "csrc/src/host_pages.cpp"
FILES = "src/torpor/memory/image_files.py"
SHARED_IMAGES = "src/torpor/memory/shared_images.py"
BACKING = "src/torpor/memory/backing.py"
LOADING = "src/torpor/memory/loading.py"
SHARING = "src/torpor/memory/sharing.py"
CHECKPOINT = "src/torpor/models/checkpoint.py"
TESTS = "tests/unit/test_image_sharing.py::"
FAULTS = "tests/unit/test_image_sharing_faults.py::"
STEPS = "tests/unit/test_memory_loading_steps.py::"

MUTANTS = (
    Mutant(
        "m4-a-shared-image-is-believed-by-its-name",
        SHARED_IMAGES,
        "if not np.array_equal(found[piece.mask], piece.hashes[piece.mask]):",
        "if found.shape != piece.hashes.shape:",
        "whoever gives a file the right name gives every engine its weights",
        TESTS + "test_m4_a_name_is_not_believed",
    ),
    Mutant(
        "m7-a-shared-image-is-kept-unasked",
        SHARED_IMAGES,
        "right = mask & image.valid & (self.hash_device(segment, mask) == image.hashes)",
        "right = mask & image.valid",
        "a sleep loses what was changed",
        TESTS + "test_m7_a_change_is_found_by_its_hash_and_reaches_nobody_else",
    ),
    Mutant(
        "loading-writes-into-shared-images",
        LOADING,
        "        images.shared.unshare(touched)\n",
        "",
        "loading new weights crashes on memory that is everybody's",
        TESTS + "test_loading_through_images_writes_to_private_ones",
    ),
    Mutant(
        "a-shared-image-can-be-written",
        FILES,
        "_SEALS = _SEAL_SHRINK | _SEAL_GROW | _SEAL_WRITE",
        "_SEALS = _SEAL_SHRINK | _SEAL_GROW",
        "one engine's fault changes the weights of all",
        TESTS + "test_nobody_can_write_to_a_shared_image",
    ),
    Mutant(
        "unfinished-files-are-taken",
        FILES,
        "if ours and fcntl.fcntl(descriptor, _GET_SEALS) & _SEALS == _SEALS:",
        "if ours:",
        "an image that is being made is mapped, and changes under its user",
        TESTS + "test_m4_a_name_is_not_believed",
    ),
    Mutant(
        "a-piece-is-named-by-its-hashes-alone",
        SHARING,
        "    told.update(np.packbits(mask).tobytes())\n",
        "",
        "bytes of other places pass for these",
        TESTS + "test_a_name_says_in_which_chunks_something_lives",
    ),
    Mutant(
        "nobody-waits-for-its-turn",
        SHARING,
        "ours = turn.take()  # before",
        "ours = turn.take() or True  # before",
        "engines that start together make an image each",
        FAULTS + "test_two_at_the_same_moment_make_one_image",
    ),
    Mutant(
        "a-stuck-engine-is-waited-for-for-ever",
        SHARING,
        "if time.monotonic() > given_up_at:",
        "if time.monotonic() < 0:",
        "one stopped engine keeps all others from starting",
        FAULTS + "test_one_who_never_gets_on_is_not_waited_for_for_ever",
    ),
    Mutant(
        "files-of-pieces-that-changed-stay-open",
        BACKING,
        "            self._leases.remove(lease)\n            os.close(lease.descriptor)\n",
        "            self._leases.remove(lease)\n",
        "memory of an image that nobody uses is never given back",
        TESTS + "test_m8_a_discard_and_a_release_let_go",
    ),
    Mutant(
        "files-stay-open-after-close",
        BACKING,
        "            for lease in self._leases:\n                os.close(lease.descriptor)\n",
        "",
        "a closed memory holds its image",
        TESTS + "test_a_closed_memory_lets_go_also_while_tensors_live",
    ),
    Mutant(
        "what-cannot-be-adopted-stays-open",
        SHARING,
        "        except (DeviceError, HostMemoryError, ConfigurationError) as error:\n            os.close(descriptor)\n",
        "        except (DeviceError, HostMemoryError, ConfigurationError) as error:\n",
        "files leak with every failure",
        FAULTS + "test_m12_every_driver_call_may_fail",
    ),
    Mutant(
        "shared-images-do-not-ask-for-host-memory",
        SHARING,
        '    if nbytes > free:\n        message = f"shared',
        '    if nbytes > 2 * free + (1 << 60):\n        message = f"shared',
        "the kernel kills somebody while an image is made",
        FAULTS + "test_without_host_memory_nothing_is_shared_and_nothing_lost",
    ),
    Mutant(
        "shared-bytes-are-not-told",
        "src/torpor/memory/pool.py",
        "            shared_image_bytes=sum(s.shared_image_bytes for s in segments),\n",
        "",
        "nobody can see what is shared",
        TESTS + "test_the_second_engine_uses_what_the_first_has_made",
    ),
    Mutant(
        "steps-tell-memory-before-it-is-there",
        LOADING,
        "            while missing.any():",
        "            while missing.all():",
        "a loader writes where there is no memory yet",
        STEPS + "test_ready_waits_for_all_of_a_tensors_memory",
    ),
    Mutant(
        "steps-send-chunks-that-are-half-written",
        LOADING,
        "self._complete[place.segment][chunks] |= pending[chunks] == 0",
        "self._complete[place.segment][chunks] |= pending[chunks] >= 0",
        "what a neighbour in the chunk writes later never reaches the device",
        STEPS + "test_a_chunk_waits_for_all_that_lie_in_it",
    ),
    Mutant(
        "steps-forget-what-was-not-told",
        LOADING,
        "        for index in list(self._unwritten):\n            self.note_written(index)\n",
        "",
        "tensors whose writer said nothing hold anything",
        STEPS + "test_what_was_not_told_is_written_when_the_block_ends",
    ),
    Mutant(
        "parts-of-a-tensor-are-told-too-early",
        CHECKPOINT,
        "            last = self._left == 0",
        "            last = True",
        "half a tensor goes to the device",
        "tests/unit/test_models_load_steps.py::test_a_tensor_is_told_once_when_all_of_it_is_read",
    ),
)
