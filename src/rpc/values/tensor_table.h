// Tensors on the wire: a table in the message's body, and their bytes as pieces beside it.
//
//   table   u32 tensors, then for each: u8 flags, and if it is defined u8 dtype, u8 dims, i64 sizes, i64 strides if it
//           is dense in another order than row by row, u8 place if its device has one, if it has elements u32 piece,
//           u64 offset in it in bytes, and if it is quantized what its integers stand for (quantized.h)
//   piece   a range of a storage that tensors of this message cover. Tensors that overlap share it, so tensors that
//           alias at the sender alias at the receiver; a view comes without the rest of its storage.
//
// A tensor arrives with the same dtype and sizes. If it was dense (it has each element of its range once, in any order
// of the dimensions), it also has the same strides; other tensors are made contiguous, and then alias nothing. What
// arrives is always a leaf, and requires grad if the sender's tensor did. Sparse, nested and meta tensors, and
// quantized ones on a device or of less than a byte per element, are refused with InvalidArgument, before anything is
// changed.
//
// Devices: both sides have lists of devices that belong together (devices.h), and the table has places in them. A CPU
// tensor without a place arrives on the CPU; a tensor of another device must have a place. Bytes of other devices are
// copied to the CPU's memory and from there, each piece once (staging.h).
//
// A piece is `unique`, so that a transport may give its memory away, only if all of this holds: no tensor, view, saved
// variable or weak reference outside the list has the storage; the memory belongs to the storage (it came from the
// storage's allocator, or in a message; a deleter of from_blob may keep memory that others see); and no other piece
// is from the same storage. A piece that was copied from another device is unique.
//
// A received piece with an owner becomes the tensors' memory, in place, if its address suits the dtype; others are
// copied. Such a tensor can be resized: it then moves to memory from libtorch's own allocator.
//
// Errors of reading: CorruptError, for every number that does not fit. No allocation trusts the table: its lengths are
// compared with the bytes and the pieces that are there. Thread-safety: functions of their arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <span>
#include <string>
#include <vector>

#include "base/byte_stream.h"
#include "muster/base/error.h"
#include "transport/transport.h"

namespace muster::rpc::detail {

// This side's devices, by place.
using Places = std::span<const c10::Device>;

// write_tensors() throws this, before it has changed anything, for a tensor on a device without a place.
struct WithoutPlace : InvalidArgument {
  WithoutPlace(size_t tensor, c10::Device device);
  size_t tensor;  // which
};

// Appends the table to `body` and the pieces to `pieces`, and leaves `tensors` empty: their storages belong to the
// pieces' owners. Reads nothing of the elements unless it must copy.
void write_tensors(std::vector<at::Tensor>& tensors, std::string& body, std::vector<transport::Piece>& pieces,
                   Places places = {});

// Reads a table; takes the owners of those pieces that it refers to.
std::vector<at::Tensor> read_tensors(WireReader& body, std::vector<transport::Piece>& pieces, Places places = {});

}  // namespace muster::rpc::detail
