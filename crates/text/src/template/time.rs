//! `strftime` in UTC for templates that print the date.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// The epoch was a Thursday.
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// Formats `now`; times before 1970 count as 1970. An unknown directive is an error naming it.
pub(super) fn format(format: &str, now: SystemTime) -> Result<String, String> {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date(days);
    let year_start = days - (0..month - 1).map(|m| days_of(year, m)).sum::<u64>() - (day - 1);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let directive = characters.next();
        let written = match directive {
            Some('Y') => write!(out, "{year}"),
            Some('y') => write!(out, "{:02}", year % 100),
            Some('m') => write!(out, "{month:02}"),
            Some('d') => write!(out, "{day:02}"),
            Some('e') => write!(out, "{day:>2}"),
            Some('j') => write!(out, "{:03}", days - year_start + 1),
            Some('B') => write!(out, "{month_name}"),
            Some('b' | 'h') => write!(out, "{}", &month_name[..3]),
            Some('A') => write!(out, "{day_name}"),
            Some('a') => write!(out, "{}", &day_name[..3]),
            Some('H') => write!(out, "{hour:02}"),
            Some('I') => write!(out, "{:02}", (hour + 11) % 12 + 1),
            Some('p') => write!(out, "{}", if hour < 12 { "AM" } else { "PM" }),
            Some('M') => write!(out, "{minute:02}"),
            Some('S') => write!(out, "{:02}", second % 60),
            Some('F') => write!(out, "{year}-{month:02}-{day:02}"),
            Some('T') => write!(out, "{hour:02}:{minute:02}:{:02}", second % 60),
            Some('Z') => write!(out, "UTC"),
            Some('z') => write!(out, "+0000"),
            Some('%') => write!(out, "%"),
            _ => {
                let name = directive.map_or_else(String::new, String::from);
                return Err(format!("strftime_now does not know %{name}"));
            }
        };
        written.expect("writing to a string can't fail");
    }
    Ok(out)
}

/// Year, month 1–12 and day 1–31 of a day since the epoch.
fn date(days: u64) -> (u64, u64, u64) {
    let (mut year, mut rest) = (1970 + days / 146_097 * 400, days % 146_097);
    loop {
        let length = (0..12).map(|month| days_of(year, month)).sum();
        if rest < length {
            break;
        }
        rest -= length;
        year += 1;
    }
    let mut month = 0;
    while rest >= days_of(year, month) {
        rest -= days_of(year, month);
        month += 1;
    }
    (year, month + 1, rest + 1)
}

/// Days of a month 0–11.
fn days_of(year: u64, month: u64) -> u64 {
    let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    match month {
        1 => 28 + u64::from(is_leap),
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn at(seconds: u64, text: &str) -> String {
        format(text, UNIX_EPOCH + Duration::from_secs(seconds)).unwrap()
    }

    #[test]
    fn known_moments_are_formatted_as_strftime_does() {
        assert_eq!(at(0, "%A %d %B %Y %H:%M:%S %j"), "Thursday 01 January 1970 00:00:00 001");
        assert_eq!(at(951_827_696, "%a %e %b %y %I %p %j"), "Tue 29 Feb 00 12 PM 060");
        assert_eq!(at(1_798_761_599, "%F %T %Z%z 100%%"), "2026-12-31 23:59:59 UTC+0000 100%");
        assert_eq!(at(16_725_225_600, "%Y-%m-%d %j"), "2500-01-01 001");
    }

    #[test]
    fn an_unknown_directive_is_named() {
        assert_eq!(format("%Q", UNIX_EPOCH).unwrap_err(), "strftime_now does not know %Q");
        assert!(format("%", UNIX_EPOCH).is_err());
    }
}
