// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Plots with logarithmic axes, as SVG that needs nothing beside itself.

use std::fmt::Write;

use super::results::short;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 430.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 92.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 58.0;
/// Half of the length of a goal that is for one place only.
const MARK: f64 = 14.0;

/// A point and its spread.
#[derive(Debug, Clone, Copy)]
pub struct Point {
    /// Where on the horizontal axis.
    pub x: f64,
    /// The median.
    pub y: f64,
    /// The smallest sample.
    pub min: f64,
    /// The largest sample.
    pub max: f64,
}

/// A line.
#[derive(Debug, Clone)]
pub struct Series {
    /// Written at its end.
    pub name: String,
    /// CSS colour.
    pub colour: &'static str,
    /// From left to right.
    pub points: Vec<Point>,
}

/// A plot.
#[derive(Debug, Clone)]
pub struct Plot {
    /// Above it.
    pub title: String,
    /// Below the horizontal axis.
    pub x_label: String,
    /// Beside the vertical axis.
    pub y_label: String,
    /// How a place on the horizontal axis is written.
    pub x_name: fn(f64) -> String,
    /// The lines.
    pub series: Vec<Series>,
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// Powers of ten around a range.
fn decades(min: f64, max: f64) -> (i32, i32) {
    let low = min.log10().floor() as i32;
    let high = max.log10().ceil() as i32;
    (low, high.max(low + 1))
}

impl Plot {
    fn points(&self) -> impl Iterator<Item = &Point> {
        self.series.iter().flat_map(|series| &series.points)
    }

    /// As an SVG document; nothing if there are no points.
    pub fn svg(&self) -> Option<String> {
        self.svg_with(&[])
    }

    /// The same with goals drawn into it, as broken lines.
    pub fn svg_with(&self, goals: &[Series]) -> Option<String> {
        let good = |value: &f64| *value > 0.0 && value.is_finite();
        let xs: Vec<f64> = self.points().map(|p| p.x).filter(good).collect();
        if xs.is_empty() {
            return None;
        }
        let goal_points = goals.iter().flat_map(|goal| &goal.points);
        let ys: Vec<f64> = self
            .points()
            .chain(goal_points)
            .flat_map(|p| [p.min, p.max])
            .filter(good)
            .collect();
        let least = |v: &[f64]| v.iter().copied().fold(f64::INFINITY, f64::min);
        let most = |v: &[f64]| v.iter().copied().fold(0.0, f64::max);
        if ys.is_empty() {
            return None;
        }
        let (x_low, x_high) = (least(&xs).ln(), most(&xs).ln().max(least(&xs).ln() + 0.1));
        let (y_low, y_high) = decades(least(&ys), most(&ys));
        let x =
            |value: f64| LEFT + (value.ln() - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT);
        let y = |value: f64| {
            let part = (value.log10() - f64::from(y_low)) / f64::from(y_high - y_low);
            HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)
        };
        let mut out = String::new();
        let mut put = |text: std::fmt::Arguments<'_>| {
            // Writing to a string does not fail.
            let _ = out.write_fmt(text);
            out.push('\n');
        };
        put(format_args!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="12" role="img">
<title>{0}</title><rect width="100%" height="100%" fill="#fff"/>
<text x="{LEFT}" y="24" font-size="15" font-weight="600" fill="#222">{0}</text>"##,
            escape(&self.title)
        ));
        for decade in y_low..=y_high {
            let value = 10_f64.powi(decade);
            let at = y(value);
            put(format_args!(
                r##"<path d="M{LEFT} {at:.1}H{:.1}" stroke="#ddd"/><text x="{:.1}" y="{:.1}" text-anchor="end" fill="#444">{}</text>"##,
                WIDTH - RIGHT,
                LEFT - 8.0,
                at + 4.0,
                power(decade)
            ));
            if decade < y_high && y_high - y_low <= 3 {
                for step in 2..10 {
                    let at = y(value * f64::from(step));
                    put(format_args!(
                        r##"<path d="M{LEFT} {at:.1}H{:.1}" stroke="#f2f2f2"/>"##,
                        WIDTH - RIGHT
                    ));
                }
            }
        }
        let mut places = xs.clone();
        places.sort_by(f64::total_cmp);
        places.dedup();
        let mut last = f64::NEG_INFINITY;
        for place in places {
            let at = x(place);
            put(format_args!(
                r##"<path d="M{at:.1} {TOP}V{:.1}" stroke="#f2f2f2"/>"##,
                HEIGHT - BOTTOM
            ));
            // Only as many names as there is room for.
            if at - last >= 46.0 {
                last = at;
                put(format_args!(
                    r##"<text x="{at:.1}" y="{:.1}" text-anchor="middle" fill="#444">{}</text>"##,
                    HEIGHT - BOTTOM + 18.0,
                    escape(&(self.x_name)(place))
                ));
            }
        }
        put(format_args!(
            r##"<path d="M{LEFT} {TOP}V{0:.1}H{1:.1}" fill="none" stroke="#666"/>
<text x="{2:.1}" y="{3:.1}" text-anchor="middle" fill="#222">{4}</text>
<text transform="translate(18 {5:.1}) rotate(-90)" text-anchor="middle" fill="#222">{6}</text>"##,
            HEIGHT - BOTTOM,
            WIDTH - RIGHT,
            (LEFT + WIDTH - RIGHT) / 2.0,
            HEIGHT - 14.0,
            escape(&self.x_label),
            (TOP + HEIGHT - BOTTOM) / 2.0,
            escape(&self.y_label)
        ));
        let mut ends: Vec<(f64, f64, &Series, f64)> = Vec::new();
        for goal in goals {
            let points: Vec<(f64, f64)> = goal
                .points
                .iter()
                .filter(|p| good(&p.x) && good(&p.y))
                .map(|p| (x(p.x), y(p.y)))
                .collect();
            let Some(end) = points.last().copied() else {
                continue;
            };
            // Where there is a goal for one place only it is to be seen as well.
            let mut path = match points[..] {
                [(at, height)] => format!("M{:.1} {height:.1}h{:.1}", at - MARK, 2.0 * MARK),
                _ => String::new(),
            };
            for (index, (at, height)) in points.iter().enumerate().skip_while(|_| points.len() == 1)
            {
                let _ = write!(
                    path,
                    "{}{at:.1} {height:.1}",
                    if index == 0 { 'M' } else { 'L' }
                );
            }
            put(format_args!(
                r##"<path class="goal" d="{path}" fill="none" stroke="{}" stroke-width="1.5" stroke-dasharray="6 4"/>"##,
                goal.colour
            ));
            let value = goal.points.last().map_or(0.0, |point| point.y);
            ends.push((end.0, end.1, goal, value));
        }
        for series in &self.series {
            let points: Vec<&Point> = series
                .points
                .iter()
                .filter(|p| good(&p.x) && good(&p.y))
                .collect();
            let Some(end) = points.last() else { continue };
            let colour = series.colour;
            let mut path = String::new();
            for (index, point) in points.iter().enumerate() {
                let _ = write!(
                    path,
                    "{}{:.1} {:.1}",
                    if index == 0 { 'M' } else { 'L' },
                    x(point.x),
                    y(point.y)
                );
            }
            put(format_args!(
                r##"<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>"##
            ));
            for point in &points {
                let (at, low, high) = (x(point.x), point.min, point.max);
                if good(&low) && good(&high) {
                    put(format_args!(
                        r##"<path d="M{at:.1} {0:.1}V{1:.1}M{2:.1} {0:.1}h6M{2:.1} {1:.1}h6" stroke="{colour}" stroke-opacity=".55"/>"##,
                        y(low),
                        y(high),
                        at - 3.0
                    ));
                }
                put(format_args!(
                    r##"<circle cx="{at:.1}" cy="{:.1}" r="3" fill="{colour}"><title>{}, {}: {} ({} to {})</title></circle>"##,
                    y(point.y),
                    escape(&series.name),
                    escape(&(self.x_name)(point.x)),
                    short(point.y),
                    short(low),
                    short(high)
                ));
            }
            ends.push((x(end.x), y(end.y), series, end.y));
        }
        // Names at the ends, moved apart where lines end close to each other.
        ends.sort_by(|a, b| a.1.total_cmp(&b.1));
        let mut lowest = f64::NEG_INFINITY;
        for (at, height, series, value) in ends {
            let height = height.max(lowest + 26.0);
            lowest = height;
            put(format_args!(
                r##"<text x="{:.1}" y="{:.1}" fill="{}" font-weight="600">{}<tspan x="{0:.1}" dy="12" font-weight="400" font-size="10">{}</tspan></text>"##,
                at + 9.0,
                height,
                series.colour,
                escape(&series.name),
                short(value)
            ));
        }
        out.push_str("</svg>\n");
        Some(out)
    }
}

/// A power of ten as people write it.
fn power(exponent: i32) -> String {
    match exponent {
        0..=3 => format!("{}", 10_u32.pow(exponent as u32)),
        4..=5 => format!("{} k", 10_u32.pow(exponent as u32 - 3)),
        6..=8 => format!("{} M", 10_u32.pow(exponent as u32 - 6)),
        -3..=-1 => format!("{:.*}", -exponent as usize, 10_f64.powi(exponent)),
        _ => format!("1e{exponent}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_holds_its_points_and_escapes_its_words() {
        let plot = Plot {
            title: "a < b".into(),
            x_label: "x".into(),
            y_label: "y".into(),
            x_name: |x| format!("{x}"),
            series: vec![Series {
                name: "one".into(),
                colour: "#000",
                points: vec![
                    Point {
                        x: 1.0,
                        y: 10.0,
                        min: 9.0,
                        max: 12.0,
                    },
                    Point {
                        x: 100.0,
                        y: 1000.0,
                        min: 0.0,
                        max: f64::NAN,
                    },
                ],
            }],
        };
        let svg = plot.svg().expect("a plot");
        assert!(svg.contains("a &lt; b") && !svg.contains("NaN") && !svg.contains("inf"));
        assert_eq!(svg.matches("<circle").count(), 2);
        let empty = Plot {
            series: Vec::new(),
            ..plot
        };
        assert!(empty.svg().is_none());
    }

    #[test]
    fn goals_are_broken_lines_inside_the_plot() {
        let point = |x, y| Point {
            x,
            y,
            min: y,
            max: y,
        };
        let line = |name: &str, points| Series {
            name: name.into(),
            colour: "#888",
            points,
        };
        let plot = Plot {
            title: "t".into(),
            x_label: "x".into(),
            y_label: "y".into(),
            x_name: |x| format!("{x}"),
            series: vec![line("one", vec![point(1.0, 20.0), point(100.0, 30.0)])],
        };
        let goals = [
            line("goal 100x", vec![point(1.0, 4000.0), point(100.0, 5000.0)]),
            line("goal 5", vec![point(10.0, 25.0)]),
            line("never", vec![point(10.0, 0.0)]),
        ];
        let svg = plot.svg_with(&goals).expect("a plot");
        assert_eq!(svg.matches("class=\"goal\"").count(), 2);
        assert!(svg.contains("goal 100x") && svg.contains("goal 5") && !svg.contains("never"));
        // The axis reaches up to them, and nothing of them is a measured point.
        assert!(svg.contains(">10 k<") && !plot.svg().expect("a plot").contains(">10 k<"));
        assert_eq!(svg.matches("<circle").count(), 2);
        let empty = Plot {
            series: Vec::new(),
            ..plot
        };
        assert!(empty.svg_with(&goals).is_none());
    }
}
