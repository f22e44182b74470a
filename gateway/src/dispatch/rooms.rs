//! Numbers by which the two halves of a request find each other. No two live ones are equal, whatever is drawn.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;

/// How large a room's number may be on the wire that carries it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoomRange {
    /// Below 2^63: what JSON readers of signed integers take.
    Wide,
    /// Below 2^31: wires with an int32.
    Narrow,
}

impl RoomRange {
    const fn bits(self) -> u32 {
        match self {
            Self::Wide => 63,
            Self::Narrow => 31,
        }
    }
}

/// Rooms that are live at this gateway.
#[derive(Debug, Default)]
pub struct Rooms {
    live: Mutex<HashSet<u64>>,
}

/// One room, live until dropped.
#[derive(Debug)]
pub struct Room {
    number: u64,
    rooms: Arc<Rooms>,
}

impl Rooms {
    /// A number that no live room has, drawn at random so that other gateways draw others. `number % ranks` is `rank`,
    /// by which a prefill worker of several ranks finds the one that was chosen; `ranks` of 0 or 1 for none.
    pub fn reserve(self: &Arc<Self>, range: RoomRange, rank: u32, ranks: u32) -> Room {
        let ranks = u64::from(ranks.max(1));
        let rank = u64::from(rank) % ranks;
        let limit = 1u64 << range.bits();
        let mut live = self.live.lock();
        loop {
            // The last multiple is left out where the rank would lift it past the limit.
            let number = rand::random::<u64>() % (limit / ranks) * ranks + rank;
            if live.insert(number) {
                return Room { number, rooms: Arc::clone(self) };
            }
        }
    }

    /// How many are live.
    pub fn len(&self) -> usize {
        self.live.lock().len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Room {
    /// The number.
    pub fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.rooms.live.lock().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_room_names_the_rank_that_was_chosen_and_no_two_live_ones_are_equal() {
        for (range, limit) in [(RoomRange::Wide, 1u64 << 63), (RoomRange::Narrow, 1 << 31)] {
            for ranks in [1u32, 2, 4, 8] {
                let rooms = Arc::new(Rooms::default());
                let mut made = Vec::new();
                for number in 0..10_000 {
                    let rank = number % ranks;
                    let room = rooms.reserve(range, rank, ranks);
                    assert_eq!(room.number() % u64::from(ranks), u64::from(rank));
                    assert!(room.number() < limit, "{}", room.number());
                    made.push(room);
                }
                let distinct: HashSet<u64> = made.iter().map(Room::number).collect();
                assert_eq!((distinct.len(), rooms.len()), (10_000, 10_000));
                drop(made);
                assert!(rooms.is_empty());
            }
        }
    }

    #[test]
    fn ranks_that_do_not_divide_the_range_stay_within_it() {
        let rooms = Arc::new(Rooms::default());
        for rank in 0..7 {
            for _ in 0..1000 {
                assert!(rooms.reserve(RoomRange::Narrow, rank, 7).number() < 1 << 31);
            }
        }
    }
}
