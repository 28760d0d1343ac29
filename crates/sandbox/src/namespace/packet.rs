//! Messages on a SEQPACKET socket: one packet is one JSON value with optional descriptors.

use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Result};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg,
    sendmsg, setsockopt, socketpair, sockopt,
};
use serde::{Serialize, de::DeserializeOwned};

/// Maximum size of a packet, sufficient for a command with a large environment.
const MAX_PACKET_BYTES: usize = 160 << 10;

/// Maximum number of descriptors in a packet; the kernel allows 253.
const MAX_DESCRIPTORS: usize = 64;

/// Creates a connected socket pair.
pub(crate) fn socket_pair() -> Result<(OwnedFd, OwnedFd)> {
    let (one, other) = socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )?;
    Ok((one, other))
}

/// Sends one message. Never raises SIGPIPE.
pub(crate) fn send<T: Serialize>(
    socket: BorrowedFd<'_>,
    message: &T,
    descriptors: &[BorrowedFd<'_>],
) -> Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MAX_PACKET_BYTES || descriptors.len() > MAX_DESCRIPTORS {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!("a message is at most {MAX_PACKET_BYTES} bytes"),
        ));
    }
    let raw: Vec<_> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() { &[][..] } else { &rights };
    loop {
        match sendmsg::<()>(
            socket.as_raw_fd(),
            &[IoSlice::new(&bytes)],
            control,
            MsgFlags::MSG_NOSIGNAL,
            None,
        ) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Receives one message; `None` if the peer has closed.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: BorrowedFd<'_>,
) -> Result<Option<(T, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; MAX_PACKET_BYTES];
    let mut control = nix::cmsg_space!([i32; MAX_DESCRIPTORS]);
    let (length, truncated, descriptors) = {
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let mut was_reset = false;
        let received = loop {
            match recvmsg::<()>(
                socket.as_raw_fd(),
                &mut parts,
                Some(&mut control),
                MsgFlags::MSG_CMSG_CLOEXEC,
            ) {
                Ok(received) => break received,
                Err(Errno::EINTR) => {}
                // ECONNRESET is reported once if the peer closed without reading everything; its
                // last messages follow.
                Err(Errno::ECONNRESET) if !was_reset => was_reset = true,
                Err(Errno::ECONNRESET) => return Ok(None),
                Err(errno) => return Err(errno.into()),
            }
        };
        let mut descriptors = Vec::new();
        for message in received.cmsgs()? {
            if let ControlMessageOwned::ScmRights(list) = message {
                // SAFETY: the kernel has just added these descriptors to this process's table; no
                // other code uses them.
                descriptors.extend(
                    list.into_iter()
                        .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }),
                );
            }
        }
        let truncated = received
            .flags
            .intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC);
        (received.bytes, truncated, descriptors)
    };
    if length == 0 {
        return Ok(None);
    }
    if truncated {
        return Err(Error::new(
            ErrorKind::InvalidData,
            "a message was truncated",
        ));
    }
    let message = serde_json::from_slice(bytes.get(..length).unwrap_or_default())?;
    Ok(Some((message, descriptors)))
}

/// Enlarges the send buffer for a message of the maximum size.
pub(crate) fn enlarge_buffers(socket: &impl AsFd) -> Result<()> {
    setsockopt(socket, sockopt::SndBuf, &(2 * MAX_PACKET_BYTES))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_message_of_a_closed_peer_is_received() {
        let (ours, its) = socket_pair().unwrap();
        send(its.as_fd(), &"farewell", &[]).unwrap();
        // This message is never read: the kernel reports a reset before the data.
        send(ours.as_fd(), &"too late", &[]).unwrap();
        drop(its);
        let (word, _) = receive::<String>(ours.as_fd()).unwrap().unwrap();
        assert_eq!(word, "farewell");
        assert!(receive::<String>(ours.as_fd()).unwrap().is_none());
    }

    #[test]
    fn message_arrives_with_its_descriptors() {
        let (one, other) = socket_pair().unwrap();
        let word = "x".repeat(100_000);
        enlarge_buffers(&one).unwrap();
        send(one.as_fd(), &word, &[one.as_fd(), other.as_fd()]).unwrap();
        let (received, descriptors) = receive::<String>(other.as_fd()).unwrap().unwrap();
        assert_eq!((received, descriptors.len()), (word, 2));
    }

    #[test]
    fn closed_peer_is_none_and_malformed_message_an_error() {
        let (one, other) = socket_pair().unwrap();
        send(one.as_fd(), &7, &[]).unwrap();
        assert!(receive::<String>(other.as_fd()).is_err());
        drop(one);
        assert!(receive::<String>(other.as_fd()).unwrap().is_none());
    }

    #[test]
    fn oversized_message_is_refused_before_sending() {
        let (one, _other) = socket_pair().unwrap();
        assert!(send(one.as_fd(), &"x".repeat(MAX_PACKET_BYTES), &[]).is_err());
    }
}
